"""What parsing costs a token, as a stream and whole.

A token is taken as four characters, about what the model's tokenizer makes of English; a marker,
which is one or a few tokens in truth, so counts as several. Times are of the process, the least of
several rounds.

    python -m minimax_jax.chat.bench
"""

import platform
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from minimax_jax.chat.dialects import M2, M3, NAMESPACE
from minimax_jax.chat.parser import ReplyParser

TOKEN = 4  # characters
ROUNDS = 5
THINKING = "]~b]ai\n<mm:think>"
TOOLS = [
    {
        "name": "edit",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "text": {"type": "string"},
                "lines": {"type": "array", "items": {"type": "integer"}},
                "options": {"type": "object", "properties": {"force": {"type": "boolean"}}},
            },
        },
    }
]
PROSE = "The loop ends one step early, so the last element is never read. "
CODE = "    if a[i] < b[j] and '<tag>' in x[0]:\n        return [y for y in z if y > 1]\n"


def main() -> None:
    """Prints a table."""
    table = Table(title=f"{platform.machine()}, Python {platform.python_version()}")
    for column in (
        "text",
        "tokens",
        "us a token",
        "us a token, twice as long",
        "us a token, whole",
    ):
        table.add_column(column, justify="left" if column == "text" else "right")
    for name, (make, options) in cases().items():
        text, longer = make(100), make(200)
        tokens = -(-len(text) // TOKEN)
        times = (
            _seconds(text, TOKEN, options) / tokens,
            _seconds(longer, TOKEN, options) * TOKEN / len(longer),
            _seconds(text, len(text), options) / tokens,
        )
        table.add_row(name, str(tokens), *(f"{seconds * 1e6:.2f}" for seconds in times))
    Console().print(table)


def cases() -> dict[str, tuple[Callable[[int], str], dict[str, Any]]]:
    """By name: a text that grows with a number, and the parser's options."""
    tools = {"tools": TOOLS}
    return {
        "a thought": (lambda size: PROSE * size, {"prompt": THINKING, **tools}),
        "code as content": (lambda size: CODE * size, tools),
        "code as a string argument": (lambda size: _call(_element("text", CODE * size)), tools),
        "a list argument": (lambda size: _call(_element("lines", _items(size))), tools),
        "a hundred calls": (lambda size: _call(_element("path", "a.py") + _nested()) * size, tools),
        "markers that are none": (lambda size: f"{NAMESPACE}<a>{NAMESPACE}<mm:thi" * size, tools),
        "a hundred calls of M2": (lambda size: _m2_call() * size, {"dialect": M2, **tools}),
    }


def _element(name: str, value: str) -> str:
    return f"{NAMESPACE}<{name}>{value}{NAMESPACE}</{name}>"


def _items(size: int) -> str:
    return "".join(_element("item", str(index)) for index in range(size))


def _nested() -> str:
    return _element("options", _element("force", "true"))


def _call(arguments: str) -> str:
    call = f'{NAMESPACE}<invoke name="edit">{arguments}{NAMESPACE}</invoke>\n'
    return f"{NAMESPACE}<{M3.block}>\n{call}{NAMESPACE}</{M3.block}>"


def _m2_call() -> str:
    argument = '<parameter name="path">a.py</parameter>\n'
    return f'<{M2.block}>\n<invoke name="edit">\n{argument}</invoke>\n</{M2.block}>'


def _seconds(text: str, size: int, options: dict[str, Any]) -> float:
    """The least time of some rounds over a text in pieces of `size` characters."""
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    rounds = []
    for _ in range(ROUNDS):
        parser, start = ReplyParser(**options), time.process_time()
        for piece in pieces:
            parser.feed(piece)
        parser.finish()
        rounds.append(time.process_time() - start)
    return min(rounds)


if __name__ == "__main__":
    main()
