"""Ways to feed one text to the parser, all of which must end in the same reply."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from minimax_jax.chat.events import Event, Reply, fold
from minimax_jax.chat.parser import ReplyParser, parse_reply

NS = "]<]minimax[>["
ENABLED = "]~b]ai\n<mm:think>"
DISABLED = "]~b]ai\n</mm:think>"
ADAPTIVE = "]~b]ai\n"


def spelled(text: str) -> str:
    """`text` with the namespace marker, written `~` in the tests."""
    return text.replace("~", NS)


def block(*calls: str) -> str:
    """A block of calls as the template writes it."""
    return spelled("~<tool_call>\n" + "".join(f"{call}\n" for call in calls) + "~</tool_call>")


def call(name: str, arguments: str = "") -> str:
    return spelled(f'~<invoke name="{name}">{arguments}~</invoke>')


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """An OpenAI tool; the properties are JSON schemas."""
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def events(pieces: Iterable[str], **options: Any) -> list[Event]:
    """All events of a text that comes in these pieces."""
    parser = ReplyParser(**options)
    return [*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()]


def cut(text: str, *places: int) -> list[str]:
    bounds = [0, *sorted(places), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


def chunks(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def parsed(text: str, **options: Any) -> Reply:
    """The reply of a text, once it is certain that cuts in two (every one of a short text) and even
    chunks give the same one.
    """
    whole = parse_reply(text, **options)
    places = range(0, len(text) + 1, 1 + len(text) // 32)
    ways = [[text[:place], text[place:]] for place in places]
    ways += [chunks(text, size) for size in (1, 2, 3, 7, 50)]
    for way in ways:
        assert fold(events(way, **options)) == whole, f"other result for the pieces {way}"
    return whole
