"""What parsing costs a token, as a stream and whole.

A token is taken as four characters, which is about what the model's tokenizer makes of English, and
of tags. Times are of the process on one core, the least of several rounds.

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
    """Prints a table, in microseconds a token, and the cost of a parser itself."""
    console = Console()
    table = Table(title=f"us a token; {platform.machine()}, Python {platform.python_version()}")
    for column in ("text", "tokens", "streamed", "twice as long", "whole"):
        table.add_column(column, justify="left" if column == "text" else "right", no_wrap=True)
    for name, (make, options) in cases().items():
        text, longer = make(100), make(200)
        times = (
            _seconds(text, TOKEN, options) / len(text),
            _seconds(longer, TOKEN, options) / len(longer),
            _seconds(text, len(text), options) / len(text),
        )
        per_token = (f"{seconds * TOKEN * 1e6:.2f}" for seconds in times)
        table.add_row(name, str(-(-len(text) // TOKEN)), *per_token)
    console.print(table)
    many = [{**TOOLS[0], "name": f"edit_{index}"} for index in range(100)]
    seconds = _least(lambda: ReplyParser(tools=many))
    console.print(f"A parser for a request with 100 tools: {seconds * 1e6:.0f} us")


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
    """The time of a text in pieces of `size` characters."""
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    return _least(lambda: _parse(ReplyParser(**options), pieces))


def _parse(parser: ReplyParser, pieces: list[str]) -> None:
    for piece in pieces:
        parser.feed(piece)
    parser.finish()


def _least(function: Callable[[], object]) -> float:
    """The least time of some rounds, in seconds."""
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


if __name__ == "__main__":
    main()
