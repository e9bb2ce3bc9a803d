"""Grammars in EBNF (`root ::= "a" [b-z]* | other`, the form of xgrammar and GBNF) to Lark.

llguidance cuts text into lexemes, the longest first, which would refuse `[a-z]+ "if"`. So each
lexeme here is one character, and its Earley parser decides the rest: every text of the grammar is
allowed and no other. The price is time: 9 to 21 ms a mask at 200,000 tokens, where a set of
letters is repeated, against 0.02 ms for a lexeme (measured, one core of an AMD EPYC).
"""

import json
import re

_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)
    |(?P<head>[A-Za-z_][\w.-]*(?=(?:\s|\#[^\n]*)*::=))
    |(?P<define>::=)
    |(?P<name>[A-Za-z_][\w.-]*)
    |"(?P<text>(?:[^"\\\n]|\\.)*)"
    |\[(?P<set>(?:[^\]\\]|\\.)+)\]
    |(?P<repeat>\{\s*\d+\s*(?:,\s*\d*\s*)?\})
    |(?P<mark>[()|*+?.])""",
    re.VERBOSE,
)
_CHARACTER = re.compile(
    r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|(?P<escape>[^xuU]))"
    r"|(?P<plain>[^\\])",
    re.DOTALL,
)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "0": "\0"}
_ESCAPABLE = "\"'\\[]/-^"
_ROOT = "root"


def ebnf_to_lark(text: str) -> str:
    """The same grammar in llguidance's Lark; its rule `root` becomes `start`. ValueError with a
    sentence for what is none, and for a rule that is used and not given.
    """
    names: dict[str, str] = {_ROOT: "start"}
    heads: set[str] = set()
    used: set[str] = set()
    words: list[str] = []
    for kind, value, place in _tokens(text):
        if kind == "head" and value in heads:
            raise ValueError(f"the grammar gives the rule {value!r} twice")
        if kind != "head" and not words:
            raise ValueError(f"the grammar begins with {value!r}, expected a rule: name ::= ...")
        if kind in ("head", "name"):
            (heads if kind == "head" else used).add(value)
            name = names.setdefault(value, f"rule_{len(names)}")
            words.append(f"\n{name}" if kind == "head" else name)
        else:
            words.append(_word(kind, value, place))
    missing = sorted((used | {_ROOT}) - heads)
    if missing:
        raise ValueError(f"the grammar has no rule {missing[0]!r}")
    return " ".join(words).lstrip("\n") + "\n"


def _tokens(text: str) -> list[tuple[str, str, int]]:
    tokens, place = [], 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise ValueError(
                f"the grammar cannot be read at {text[place : place + 20]!r} in line "
                f"{text.count(chr(10), 0, place) + 1}"
            )
        kind = match.lastgroup
        assert kind is not None
        if kind != "space":
            tokens.append((kind, match[kind], place))
        place = match.end()
    return tokens


def _word(kind: str, value: str, place: int) -> str:
    if kind == "define":
        return ":"
    if kind == "text":
        characters = [json.dumps(character) for character, _ in _characters(value)]
        return f"({' '.join(characters)})" if characters else '""'
    if kind == "set":
        return _set(value)
    if kind == "repeat":
        return "".join(value.split())
    return "/(?s:.)/" if value == "." else value


def _set(value: str) -> str:
    """One character out of a set: `a-z`, `^"`, `\\n`."""
    negated = value.startswith("^")
    members = _characters(value[1:] if negated else value)
    if not members:
        raise ValueError(f"the grammar's set [{value}] names no character")
    ranges, place = [], 0
    while place < len(members):
        first = members[place][0]
        is_range = members[place + 1 : place + 2] == [("-", True)] and place + 2 < len(members)
        last = members[place + 2][0] if is_range else first
        if last < first:
            raise ValueError(f"the grammar's set [{value}] has the range {first}-{last}, backwards")
        ranges.append(rf"\u{{{ord(first):x}}}-\u{{{ord(last):x}}}")
        place += 3 if is_range else 1
    return f"/[{'^' if negated else ''}{''.join(ranges)}]/"


def _characters(value: str) -> list[tuple[str, bool]]:
    """Each character, and whether it was written without a backslash."""
    characters, place = [], 0
    while place < len(value):
        match = _CHARACTER.match(value, place)
        if match is None:
            raise ValueError(f"the grammar has the escape {value[place : place + 6]!r}, unknown")
        characters.append(_character(match))
        place = match.end()
    return characters


def _character(match: re.Match[str]) -> tuple[str, bool]:
    if match["plain"]:
        return match["plain"], True
    if escape := match["escape"]:
        if escape not in _CONTROLS and escape not in _ESCAPABLE:
            raise ValueError(f"the grammar has the escape \\{escape}, unknown")
        return _CONTROLS.get(escape, escape), False
    code = int(match["x"] or match["u"] or match["U"], 16)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise ValueError(f"the grammar has the escape {match[0]}, which is no character")
    return chr(code), False
