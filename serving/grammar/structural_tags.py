"""Structural tags, the JSON in which a gateway describes a reply with calls in it, to Lark.

The form is xgrammar's: formats within formats (`sequence`, `tag`, `triggered_tags`, ...), and its
older list of `structures` with `triggers`. Free text of a tag ends with the tag's first `end`.
"""

import json
from collections.abc import Sequence
from typing import Any

from minimax_jax.chat.dialects import Dialect
from serving.grammar.json_grammar import json_rule
from serving.grammar.lark_pieces import FreeText, Lexeme, Pieces, Rule, join, with_excludes
from serving.grammar.lark_text import LarkText
from serving.grammar.vocabulary import GrammarVocabulary

_NOT_TRANSLATED = "structural_tag has the format {kind!r}, expected one of {known}"


def structural_tag_to_lark(text: str, vocabulary: GrammarVocabulary, dialect: Dialect) -> str:
    """The grammar of a structural tag. ValueError with a sentence for what cannot be said in it."""
    try:
        tag = json.loads(text)
    except ValueError as error:
        raise ValueError(f"structural_tag is no JSON: {error}") from error
    data = _format_of(tag)
    lark = LarkText(vocabulary, dialect.namespace)
    return lark.grammar(_Translation(lark).pieces(data))


def _format_of(tag: Any) -> dict[str, Any]:
    if isinstance(tag, dict) and isinstance(tag.get("format"), dict):
        return tag["format"]
    if isinstance(tag, dict) and isinstance(tag.get("structures"), list):
        tags = [
            {
                "begin": _field(one, "begin", str),
                "content": {"type": "json_schema", "json_schema": one.get("schema", {})},
                "end": _field(one, "end", str),
            }
            for one in tag["structures"]
        ]
        return {"type": "triggered_tags", "triggers": _field(tag, "triggers", list), "tags": tags}
    raise ValueError("structural_tag has neither a format nor structures with triggers")


class _Translation:
    """One method a format, each from its JSON to pieces."""

    def __init__(self, lark: LarkText):
        self._lark = lark
        self._formats = {
            "const_string": lambda data: lark.literal(_field(data, "value", str)),
            "json_schema": self._json_schema,
            "regex": self._regex,
            "any_text": lambda data: (FreeText(_texts(data, "excludes")),),
            "sequence": lambda data: join(map(self.pieces, _field(data, "elements", list))),
            "or": lambda data: lark.either([*map(self.pieces, _field(data, "elements", list))]),
            "optional": lambda data: lark.either([self._content(data), ()]),
            "star": lambda data: lark.repeat(self._content(data), "*", from_none=True),
            "plus": lambda data: lark.repeat(self._content(data), "+", from_none=False),
            "repeat": self._repeat,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def pieces(self, data: Any) -> Pieces:
        """The pieces of a format."""
        kind = data.get("type") if isinstance(data, dict) else data
        if not isinstance(kind, str) or kind not in self._formats:
            known = ", ".join(self._formats)
            raise ValueError(_NOT_TRANSLATED.format(kind=kind, known=known))
        return self._formats[kind](data)

    def _content(self, data: dict[str, Any]) -> Pieces:
        return self.pieces(_field(data, "content", dict))

    def _json_schema(self, data: dict[str, Any]) -> Pieces:
        if data.get("style", "json") != "json":
            raise ValueError(f"structural_tag has a schema of style {data['style']!r}, not 'json'")
        return (Rule(json_rule(_field(data, "json_schema", dict | bool))),)

    def _regex(self, data: dict[str, Any]) -> Pieces:
        return (Lexeme(regex_literal(_field(data, "pattern", str)), is_open=True),)

    def _repeat(self, data: dict[str, Any]) -> Pieces:
        least, most = _field(data, "min", int), _field(data, "max", int)
        if least < 0 or (most != -1 and most < max(least, 1)):
            raise ValueError(f"structural_tag repeats from {least} to {most} times")
        times = f"{{{least},{'' if most == -1 else most}}}"
        return self._lark.repeat(self._content(data), times, from_none=least == 0)

    def _tag(self, data: dict[str, Any]) -> Pieces:
        ends = _texts(data, "end") or ("",)
        content = with_excludes(self._content(data), [end for end in ends if end])
        closers = [self._lark.literal(end) for end in ends]
        end = closers[0] if len(closers) == 1 else self._lark.either(closers)
        return join([self._lark.literal(_field(data, "begin", str)), content, end])

    def _triggered_tags(self, data: dict[str, Any]) -> Pieces:
        """Free text without a trigger; then a tag, again and again or once."""
        triggers = _texts(data, "triggers")
        tags = _field(data, "tags", list)
        begins = [_field(tag, "begin", str) for tag in tags]
        for begin in begins:
            if not triggers or not begin.startswith(triggers):
                raise ValueError(f"structural_tag has no trigger for the tag that begins {begin!r}")
        namespace = self._lark.namespace
        # A tag of M3's in the free text would be no part of a call.
        marked = (namespace,) if namespace and any(namespace in one for one in triggers) else ()
        text: Pieces = (FreeText((*triggers, *_texts(data, "excludes"), *marked)),)
        direct = [self._tag(tag) for tag in tags]
        behind_text = self._lark.either(
            [join([_before(text, begin), tag]) for tag, begin in zip(direct, begins, strict=True)]
        )
        first = self._lark.either(direct) if data.get("at_least_one") else behind_text
        if data.get("stop_after_first"):
            return first if data.get("at_least_one") else self._lark.either([first, text])
        more = self._lark.repeat(behind_text, "*", from_none=True)
        return join([first, more, text] if data.get("at_least_one") else [more, text])

    def _tags_with_separator(self, data: dict[str, Any]) -> Pieces:
        one = self._lark.either([self._tag(tag) for tag in _field(data, "tags", list)])
        if not data.get("stop_after_first"):
            separator = self._lark.literal(_field(data, "separator", str))
            more = self._lark.repeat(join([separator, one]), "*", from_none=True)
            one = join([one, more])
        return one if data.get("at_least_one") else self._lark.either([one, ()])


def regex_literal(pattern: str) -> str:
    """A regular expression between Lark's slashes."""
    escaped, place = [], 0
    while place < len(pattern):
        step = 2 if pattern[place] == "\\" else 1
        part = pattern[place : place + step]
        escaped.append({"/": r"\/", "\n": r"\n", "\r": r"\r"}.get(part, part))
        place += step
    return f"/{''.join(escaped)}/"


def _before(text: Pieces, begin: str) -> Pieces:
    """Free text before a tag: where the two are merged, the tag's whole beginning ends it."""
    return with_excludes(text, [begin])


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _texts(data: dict[str, Any], name: str) -> tuple[str, ...]:
    value = data.get(name) or ()
    values: Sequence[Any] = [value] if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not all(map(_is_text, values)):
        raise ValueError(f"structural_tag has {name}={value!r}, expected a text or a list of texts")
    return tuple(values)


def _field(data: Any, name: str, kind: Any) -> Any:
    value = data.get(name) if isinstance(data, dict) else None
    if not isinstance(value, kind):
        raise ValueError(f"structural_tag has {name}={value!r}, expected {_kind_name(kind)}")
    return value


def _kind_name(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))
