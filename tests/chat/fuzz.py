"""Random texts, and an account of what became of each character of them.

"No character is lost" means, exactly: the pieces that the parser books, in order, join to the
text. A piece is booked as thought or as content, and those join to the reply's `reasoning` and
`content`; or as text of an argument, and those of a call whose arguments are all strings join to
its values; or as markup, which must be white space and whole markers, or a tag that the end of the
text has cut off.

    python -m tests.chat.fuzz --texts 100000 --seed 1
"""

import argparse
import json
import random
import re
import time
from unittest import mock

from minimax_jax.chat import parser
from minimax_jax.chat.dialects import M2, M3, Dialect
from minimax_jax.chat.events import Output, Reply, fold
from tests.chat.replies import ADAPTIVE, DISABLED, ENABLED, NS, cut, spelled, tool

STRING = {"type": "string"}
STRINGS = tool("f", a=STRING, city=STRING, **{"x y": STRING})
TYPED = tool(
    "g",
    a={"type": "array", "items": {"type": "integer"}},
    city={"type": ["string", "null"]},
    b={"type": "object", "properties": {"a": {"type": "boolean"}, "city": STRING}},
)
M3_PARTS = [
    *("~<tool_call>", "~</tool_call>", '~<invoke name="f">', "~<invoke name='g'>", "~</invoke>"),
    *("~<a>", "~</a>", "~<city>", "~</city>", "~<b>", "~</b>", "~<x y>", "~</x y>", "~<item>"),
    *("~</item>", "~", "~<", "~</", "~<invoke name=", '~<invoke name="', "~<city", "]", "]<]mini"),
    *("<mm:think>", "</mm:think>", "<mm:th", "</mm:think", "~</mm:think>", "~ <a>", "~ \n</a>"),
]
M2_PARTS = [
    *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="f">', "<invoke name=g>"),
    *("</invoke>", '<parameter name="a">', "<parameter name='city'>", "</parameter>"),
    *("<think>", "</think>", "<invoke", "<invoke name=", "<parameter ", "</param", "<thi", "<"),
]
PLAIN_PARTS = [
    *(" ", "\n", "\n\n", "\t", "x", "12", "true", "null", "nu", "[1, 2]", '{"a": 1}', '"', "\\"),
    *(">", '">', "'", "name", "&lt;", "\u00e9", "\U0001f600", "\u00a0", "\u2028", "\x00", "$text"),
]
_MARKERS = {
    M3: rf"(?:\s|</?mm:think>|{re.escape(NS)}\s*<[^<>\n]*>|{re.escape(NS)}\s*(?:<[^<>\n]*)?\Z)*",
    M2: r"(?:\s|</?(?:think|minimax:tool_call|invoke|parameter)>|<(?:invoke|parameter)[^<>\n]*>"
    r"|<(?:invoke|parameter)[^<>\n]*\Z)*",
}


class Ledger(Output):
    """An output that books what passes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.booked: list[tuple[str, str]] = []

    def reasoning(self, text: str) -> None:
        self.booked.append(("reasoning", text))
        super().reasoning(text)

    def content(self, text: str) -> None:
        self.booked.append(("content", text))
        super().content(text)

    def leaf(self, text: str) -> None:
        self.booked.append(("leaf", text))

    def markup(self, text: str) -> None:
        self.booked.append(("markup", text))

    def joined(self, *kinds: str) -> str:
        return "".join(text for kind, text in self.booked if not kinds or kind in kinds)


def random_text(source: random.Random, dialect: Dialect) -> str:
    """Markers, pieces of markers and plain text, sometimes after the beginning of a call."""
    markers = M3_PARTS if dialect is M3 else M2_PARTS
    starts = ["", "".join(markers[0:3]), "".join(markers[0:3]) + source.choice(markers)]
    parts = [source.choice(starts)]
    for _ in range(source.randrange(20)):
        parts.append(source.choice(markers if source.random() < 0.6 else PLAIN_PARTS))
    return spelled("".join(parts)) if dialect is M3 else "".join(parts)


def check(source: random.Random) -> int:
    """One text: no exception, no character lost, one result for any pieces. Its length."""
    dialect = source.choice([M3, M3, M2])
    text = random_text(source, dialect)
    prompt = source.choice([ENABLED, DISABLED, ADAPTIVE])
    prompt = prompt.replace(M3.think_start, dialect.think_start)
    tools = source.choice([[], [STRINGS], [STRINGS], [STRINGS, TYPED]])
    options = {"prompt": prompt, "tools": tools, "dialect": dialect}
    with mock.patch.object(parser, "Output", Ledger):
        reader = parser.ReplyParser(**options)
    reply = fold([*reader.feed(text), *reader.finish()])
    account(text, reply, reader._output, dialect, strings=tools == [STRINGS])
    places = [source.randint(0, len(text)) for _ in range(source.randrange(6))]
    for pieces in (cut(text, *places), list(text)):
        reader = parser.ReplyParser(**options)
        events = [event for piece in pieces for event in reader.feed(piece)]
        assert fold([*events, *reader.finish()]) == reply, (options, pieces)
    return len(text)


def account(text: str, reply: Reply, ledger: Output, dialect: Dialect, *, strings: bool) -> None:
    """Asserts that every character of `text` is somewhere."""
    assert isinstance(ledger, Ledger)
    assert ledger.joined() == text, (text, ledger.booked)
    assert ledger.joined("reasoning") == (reply.reasoning or ""), (text, reply)
    assert ledger.joined("content") == (reply.content or ""), (text, reply)
    for kind, piece in ledger.booked:
        assert kind != "markup" or re.fullmatch(_MARKERS[dialect], piece), (text, piece)
    values = [json.loads(call.arguments) for call in reply.tool_calls]
    assert all(isinstance(value, dict) for value in values), (text, reply)
    declared = all(value.keys() <= {"a", "city", "x y"} for value in values)
    if strings and declared and all(call.name == "f" for call in reply.tool_calls):
        found = "".join(text for value in values for text in value.values())
        assert found == ledger.joined("leaf"), (text, reply)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--texts", type=int, default=100_000)
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    chosen = options.parse_args()
    print(f"seed {chosen.seed}", flush=True)
    source, start = random.Random(chosen.seed), time.perf_counter()
    characters = sum(check(source) for _ in range(chosen.texts))
    seconds = time.perf_counter() - start
    print(
        f"{chosen.texts} texts of {characters} characters: no exception, "
        f"no character lost, one result for any pieces ({seconds:.0f} s)"
    )


if __name__ == "__main__":
    main()
