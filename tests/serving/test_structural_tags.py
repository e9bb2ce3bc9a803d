"""Structural tags: what the real gateway sends for a call that must come, and the other formats."""

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from minimax_jax.chat import parse_reply
from minimax_jax.chat.dialects import M3
from serving.grammar.source import Thought
from tests.serving.grammars import accepts, allowed, matcher, plain_ids, tokenizer

RECORDED = json.loads((Path(__file__).parents[1] / "golden" / "structural_tags.json").read_text())
SCHEMAS = {tool["name"]: tool["parameters"] for tool in RECORDED["tools"]}
NS = M3.namespace
# What an eager but clueless model might try next, wherever it is.
TAGS = [
    *(f"{NS}<tool_call>\n", f'{NS}<invoke name="get_weather">', f'{NS}<invoke name="now">'),
    *(f"{NS}<{slash}{name}>" for name in ("city", "days", "unit", "where") for slash in ("", "/")),
    *(f"{NS}<{slash}{name}>" for name in ("tags", "item", "lat") for slash in ("", "/")),
    *(f"{NS}</invoke>\n", f"{NS}</tool_call>", "<mm:think>", "</mm:think>"),
]


def _tag(name: str) -> str:
    return json.dumps(RECORDED["cases"][name]["structural_tag"])


def _draw(name: str, thought: Thought, seed: int) -> str | None:
    """A reply that tries tags at random, with a few random tokens between; None if too long."""
    rng, one, ids = np.random.default_rng(seed), matcher("structural_tag", _tag(name), thought), []
    stop = tokenizer().stop_ids[0]
    while len(ids) < 500:
        for place in rng.permutation(len(TAGS)):
            tried = tokenizer().encode(TAGS[place])
            if rng.random() < 0.9 and _goes_on(one, tried):
                ids += tried
                break
        choices = allowed(one)
        assert len(choices), tokenizer().decode(ids)
        if stop in choices and rng.random() < 0.5:
            return tokenizer().decode(ids)
        plain = [i for i in choices if i not in (stop, tokenizer().encode(NS)[0])]
        if plain:
            ids.append(int(rng.choice(plain)))
            one.advance(ids[-1:])
    return None


def _goes_on(one, ids) -> bool:
    rows = one.masks(ids)
    bits = [row[token // 32] >> (token % 32) & 1 for row, token in zip(rows, ids, strict=False)]
    if all(bits):
        one.advance(ids)
    return all(bits)


@pytest.mark.parametrize(
    ("name", "thought"),
    [
        ("required", Thought.OVER),
        ("required", Thought.POSSIBLE),
        ("required with an open thought", Thought.OPEN),
        ("named", Thought.OPEN),
        ("required from the first token", Thought.OVER),
    ],
)
def test_f139_required_and_named_tools_are_called_whatever_the_weights(name, thought):
    """F139: whoever draws the tokens, the reply has a call that the tool's schema takes."""
    tools = [{"type": "function", "function": tool} for tool in RECORDED["tools"]]
    opened = thought is Thought.OPEN or name == "required from the first token"
    prompt = M3.think_start if opened else ""
    whole = [text for seed in range(12) if (text := _draw(name, thought, seed)) is not None]
    assert len(whole) >= 6
    for text in whole:
        calls = parse_reply(text, prompt=prompt, tools=tools).tool_calls
        assert calls, text
        for call in calls:
            assert call.name in (["get_weather"] if name == "named" else SCHEMAS), text
            if call.name == "get_weather":
                # The gateway leaves this enumeration open: its grammar for it is any text.
                arguments = {k: v for k, v in json.loads(call.arguments).items() if k != "unit"}
                jsonschema.validate(arguments, SCHEMAS[call.name])


CALL = (
    f'{NS}<tool_call>\n{NS}<invoke name="get_weather">{NS}<city>New "York" <b>{NS}</city>'
    f"{NS}<days>3{NS}</days>{NS}<tags>{NS}<item>a{NS}</item>{NS}<item>{NS}</item>{NS}</tags>"
    f"{NS}<where>{NS}<lat>-1.5{NS}</lat>{NS}</where>{NS}</invoke>\n"
    f'{NS}<invoke name="now">{NS}</invoke>\n{NS}</tool_call>'
)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("", ""), True),
        (("<tool_call>\n", "<tool_call>"), False),
        (("get_weather", "get_wether"), False),
        (("3", "three"), False),
        (("-1.5", "north"), False),
        ((f"{NS}<days>3{NS}</days>", ""), True),
        ((f"{NS}<city>", f"{NS}<town>"), False),
        ((f'{NS}<invoke name="now">{NS}</invoke>\n', ""), True),
        ((f'{NS}<invoke name="now">', f'{NS}<invoke name="now">{NS}<zone>x{NS}</zone>'), True),
        ((f"{NS}</tool_call>", ""), False),
        ((f"{NS}</tool_call>", f"{NS}</tool_call> and text"), True),
        ((f"{NS}</tool_call>", f"{NS}</tool_call>{NS}"), False),
        ((f"{NS}<tool_call>", f"text {NS}<tool_call>"), False),
        ((f"{NS}<tool_call>", f"<mm:think>so</mm:think>{NS}<tool_call>"), True),
        ((f"{NS}<tool_call>", f"</mm:think>{NS}<tool_call>"), True),
    ],
)
def test_the_recorded_tag_takes_just_the_calls_it_describes(change, expected):
    text = CALL.replace(*change) if change[0] else CALL
    one = matcher("structural_tag", _tag("required"))
    assert accepts(one, tokenizer().encode(text)) == expected


def _accepted(form: dict, texts: list[str]) -> list[bool]:
    tag = json.dumps({"type": "structural_tag", "format": form})
    return [accepts(matcher("structural_tag", tag), plain_ids(text)) for text in texts]


def _const(text: str) -> dict:
    return {"type": "const_string", "value": text}


def _function(name: str) -> dict:
    schema = {"type": "json_schema", "json_schema": {"type": "integer"}}
    return {"type": "tag", "begin": f"<f={name}>", "content": schema, "end": "</f>"}


FORMS = [
    (_const('a"\\\né'), {'a"\\\né': True, "a": False}),
    ({"type": "regex", "pattern": "[a/]+"}, {"a/a": True, "b": False, "": False}),
    (
        {"type": "sequence", "elements": [{"type": "regex", "pattern": "[a-z]+"}, _const("if")]},
        {"xif": True, "ifif": True, "if": False, "xifx": False},
    ),
    (
        {"type": "or", "elements": [_const("ab"), _const("abc")]},
        {"ab": True, "abc": True, "a": False},
    ),
    (
        {"type": "tag", "begin": "<", "content": {"type": "any_text"}, "end": [">", "!"]},
        {"<a b>": True, "<>": True, "<a!": True, "<a>b>": False, "<a": False},
    ),
    (
        {"type": "any_text", "excludes": ["bad", "\n"]},
        {"": True, "ba d": True, "a bad": False, "a\n": False},
    ),
    (
        {"type": "repeat", "min": 2, "max": 3, "content": _function("x")},
        {"<f=x>1</f>" * n: n in (2, 3) for n in range(5)},
    ),
    (
        {"type": "plus", "content": {"type": "optional", "content": _const("ab")}},
        {"": True, "abab": True, "aba": False},
    ),
    (
        {"type": "tags_with_separator", "tags": [_function("x"), _function("y")], "separator": ","},
        {"": True, "<f=x>1</f>,<f=y>-2</f>": True, "<f=x>1</f>,": False, "<f=x>1</f>;": False},
    ),
    (
        {
            "type": "tags_with_separator",
            "tags": [_function("x")],
            "separator": ",",
            "at_least_one": True,
            "stop_after_first": True,
        },
        {"": False, "<f=x>1</f>": True, "<f=x>1</f>,<f=x>1</f>": False},
    ),
    (
        {"type": "triggered_tags", "triggers": ["<f="], "tags": [_function("x"), _function("yy")]},
        {
            "": True,
            "a <f b": True,
            "a <f=x>12</f> b <f=yy>3</f>c": True,
            "<f=x>1</f>": True,
            "a <f=": False,
            "a <f=z>1</f>": False,
            "a <f=x>one</f>": False,
        },
    ),
    (
        {
            "type": "triggered_tags",
            "triggers": ["<f="],
            "tags": [_function("x")],
            "at_least_one": True,
            "stop_after_first": True,
        },
        {"<f=x>1</f>": True, "a<f=x>1</f>": False, "<f=x>1</f>a": False, "": False},
    ),
]


@pytest.mark.parametrize("index", range(len(FORMS)))
def test_each_format_takes_what_it_says(index):
    form, texts = FORMS[index]
    assert _accepted(form, list(texts)) == list(texts.values()), list(texts)


def test_older_form_with_structures_and_triggers():
    structure = {"begin": "<f=x>", "schema": {"type": "boolean"}, "end": "</f>"}
    tag = json.dumps({"structures": [structure], "triggers": ["<f="]})
    assert accepts(matcher("structural_tag", tag), plain_ids("so <f=x>true</f>."))
    assert not accepts(matcher("structural_tag", tag), plain_ids("so <f=x>1</f>."))


INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        ({"type": "qwen_xml_parameter"}, "has the format 'qwen_xml_parameter', expected one of"),
        ({"type": "const_string"}, "has value=None, expected str"),
        ({"type": "sequence", "elements": [{"type": "any_text"}, INTEGER]}, "cannot be told from"),
        ({"type": "json_schema", "json_schema": {}, "style": "xml"}, "a schema of style 'xml'"),
        ({"type": "repeat", "min": 3, "max": 2, "content": INTEGER}, "repeats from 3 to 2 times"),
        ({"type": "any_text", "excludes": [1]}, "expected a text or a list of texts"),
        (
            {"type": "triggered_tags", "triggers": ["<g"], "tags": [_function("x")]},
            "has no trigger for the tag that begins '<f=x>'",
        ),
    ],
)
def test_what_cannot_be_translated_is_refused_with_a_sentence(form, sentence):
    with pytest.raises(ValueError, match=f"^structural_tag .*{sentence}"):
        matcher("structural_tag", json.dumps({"format": form}))


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1}'])
def test_what_is_no_structural_tag_is_refused(text):
    with pytest.raises(ValueError, match="^structural_tag "):
        matcher("structural_tag", text)
