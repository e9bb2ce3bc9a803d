"""Arguments to JSON by the tool's schema (specification model 4.4)."""

import json
from typing import Any

import pytest

from minimax_jax.chat.parser import ReplyParser, parse_reply
from tests.chat.replies import block, call, events, parsed, spelled, tool

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
ARRAY, OBJECT = {"type": "array"}, {"type": "object"}
NULLABLE = {"anyOf": [STRING, {"type": "null"}]}


def argument(value: str, schema: Any) -> Any:
    """What an argument of this schema and text becomes, in JSON's own types."""
    text = block(call("f", f"~<x>{value}~</x>"))
    [one] = parsed(text, tools=[tool("f", x=schema)]).tool_calls
    assert one.complete
    return json.loads(one.arguments, parse_constant=pytest.fail)["x"]


def same(found: Any, expected: Any) -> bool:
    """Equal, and of the same types: `1`, `1.0` and `true` are three values."""
    return json.dumps(found) == json.dumps(expected)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        # Strings are verbatim, whatever they look like.
        *((text, STRING, text) for text in ("5", "true", "null", "", " a ", '{"a": 1}', "'\\\"\n")),
        ("\u00e9\u4e2d\U0001f600\u2028\x00", STRING, "\u00e9\u4e2d\U0001f600\u2028\x00"),
        # Numbers, in JSON's and in other spellings.
        ("3", INTEGER, 3),
        (" -3\n", INTEGER, -3),
        ("+3", INTEGER, 3),
        ("007", INTEGER, 7),
        ("3.0", INTEGER, 3),
        ("1e3", INTEGER, 1000),
        ("3.5", INTEGER, 3.5),
        ("9" * 40, INTEGER, int("9" * 40)),
        ("1.5", {"type": "number"}, 1.5),
        ("3", {"type": "number"}, 3),
        ("3.0", {"type": "number"}, 3.0),
        (".5", {"type": "number"}, 0.5),
        ("5.", {"type": "number"}, 5.0),
        ("1E-3", {"type": "number"}, 0.001),
        # What is no number of JSON stays a string.
        *((text, INTEGER, text) for text in ("", "three", "1_000", "0x10", "1,5", "\u0663")),
        *((text, {"type": "number"}, text) for text in ("NaN", "Infinity", "1e999", "9" * 5000)),
        # Booleans.
        *(
            (text, {"type": "boolean"}, True)
            for text in ("true", "True", "1", "yes", "on", " true")
        ),
        *((text, {"type": "boolean"}, False) for text in ("false", "FALSE", "0", "no", "off")),
        ("maybe", {"type": "boolean"}, "maybe"),
        # Null where the schema allows it.
        *((text, {"type": "null"}, None) for text in ("null", "Null", "NULL", "")),
        *((text, NULLABLE, None) for text in ("null", "Null", "NULL")),
        *((text, NULLABLE, text) for text in ("", "nul", "nULL", "nullable", " null", "None")),
        ("null", {"type": "integer", "nullable": True}, None),
        ("", {"type": ["integer", "null"]}, None),
        ("null", INTEGER, "null"),
        # Unions: the exact JSON of another type goes before the string.
        ("5", {"type": ["string", "integer"]}, 5),
        (" 5", {"type": ["string", "integer"]}, " 5"),
        ("05", {"type": ["string", "integer"]}, "05"),
        ("true", {"oneOf": [STRING, {"type": "boolean"}]}, True),
        ("yes", {"oneOf": [STRING, {"type": "boolean"}]}, "yes"),
        ("1", {"type": ["integer", "boolean"]}, 1),
        ("1.5", {"anyOf": [INTEGER, {"type": "number"}]}, 1.5),
        ('["a"]', {"anyOf": [STRING, ARRAY]}, ["a"]),
        ("[a", {"anyOf": [STRING, ARRAY]}, "[a"),
        # Without a type only literals are more than strings.
        *((text, {}, json.loads(text)) for text in ("true", "false", "null")),
        *((text, True, text) for text in ("5", "1.5", "True", "[]", "")),
        # Types that follow from elsewhere.
        ("2", {"enum": [1, 2, "auto"]}, 2),
        ("auto", {"enum": [1, 2, "auto"]}, "auto"),
        ("5", {"const": "5"}, "5"),
        ("5", {"allOf": [{"description": "count"}, INTEGER]}, 5),
        ("5", {"type": "int"}, 5),
        ("", {"properties": {"a": STRING}}, {}),
        # Containers as text.
        ("", ARRAY, []),
        (" \n", OBJECT, {}),
        ("", {"type": ["array", "string"]}, ""),
        (' [1, "a", null]', ARRAY, [1, "a", None]),
        ('{"a": {"b": [1.5]}}', OBJECT, {"a": {"b": [1.5]}}),
        ("[1", ARRAY, "[1"),
        ("[NaN]", ARRAY, "[NaN]"),
        ("[" * 3000, ARRAY, "[" * 3000),
        ('{"a": 1}', ARRAY, '{"a": 1}'),
        ("a, b", ARRAY, "a, b"),
    ],
)
def test_a_leaf(text, schema, value):
    found = argument(text, schema)
    assert same(found, value), found


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        # Lists: items in order, whatever they are called.
        ("~<item>a~</item>", {"type": "array", "items": STRING}, ["a"]),
        ("~<item>1~</item>\n ~<item>2~</item>", {"type": "array", "items": INTEGER}, [1, 2]),
        ("~<a>1~</a>~<b>2~</b>", {"type": "array", "items": INTEGER}, [1, 2]),
        ("~<item>1~</item>~<item>x~</item>", {"prefixItems": [INTEGER], "items": STRING}, [1, "x"]),
        ("~<item>1~</item>~<item>x~</item>", {"items": [INTEGER], "type": "array"}, [1, "x"]),
        (
            "~<item>~<item>1~</item>~</item>~<item>~</item>",
            {"type": "array", "items": {"type": "array", "items": INTEGER}},
            [[1], []],
        ),
        ("a~<item>b~</item> c ", {"type": "array", "items": STRING}, ["a", "b", " c "]),
        # Objects: members by name, typed by theirs.
        ("~<a>1~</a>~<b>1~</b>", {"properties": {"a": INTEGER, "b": STRING}}, {"a": 1, "b": "1"}),
        ("~<a>1~</a>", {"type": "object", "additionalProperties": INTEGER}, {"a": 1}),
        ("~<a>1~</a>", {"type": "object", "additionalProperties": False}, {"a": "1"}),
        ("~<item>1~</item>", {"type": "object"}, {"item": "1"}),
        ("~<item>1~</item>", {"properties": {"item": INTEGER}}, {"item": 1}),
        ("~<a>~<b>~<c>1~</c>~</b>~</a>", {}, {"a": {"b": {"c": "1"}}}),
        ("~<>1~</>~< b >2~</ b >", {}, {"": "1", " b ": "2"}),
        # Repeated names are a list.
        ("~<a>1~</a>~<b>~</b>~<a>2~</a>", {}, {"a": ["1", "2"], "b": ""}),
        (
            "~<a>1~</a>~<a>2~</a>",
            {"properties": {"a": {"type": "array", "items": INTEGER}}},
            {"a": [1, 2]},
        ),
        # Text beside elements.
        (" x\n~<a>1~</a> y", {}, {"a": "1", "$text": " x\n y"}),
        (
            "x~<$text>1~</$text>~<$$text>~</$$text>",
            {},
            {"$text": "1", "$$text": "", "$$$text": "x"},
        ),
        # F40, and without a schema.
        (
            "~<tags>~<item>a~</item>~</tags>",
            {"properties": {"tags": {"type": "array", "items": STRING}}},
            {"tags": ["a"]},
        ),
        ("~<tags>~<item>a~</item>~</tags>", {}, {"tags": ["a"]}),
        ("~<item>a~</item>~<b>1~</b>", {}, {"item": "a", "b": "1"}),
        # Unions of containers: what is there decides.
        ("~<item>1~</item>", {"type": ["array", "object"], "items": INTEGER}, [1]),
        ("~<a>1~</a>", {"anyOf": [ARRAY, {"properties": {"a": INTEGER}}]}, {"a": 1}),
        ("~<a>1~</a>", {"anyOf": [{"type": "null"}, {"properties": {"a": INTEGER}}]}, {"a": 1}),
        (
            "~<v>1~</v>",
            {"anyOf": [{"properties": {"v": {"type": "null"}}}, {"properties": {"v": INTEGER}}]},
            {"v": 1},
        ),
        # Strings inside are verbatim too.
        ("~<a> ~<b>1~</b>~</a>", {"properties": {"a": STRING}}, {"a": spelled(" ~<b>1~</b>")}),
        # Elements where a scalar was expected are kept.
        ("~<item>1~</item>", INTEGER, ["1"]),
    ],
)
def test_elements(text, schema, value):
    found = argument(text, schema)
    assert same(found, value), found


def test_json_of_every_type():
    """F49: booleans, null, floats, nested lists, quotes, backslashes, newlines and emoji."""
    schema = {
        **{"flag": {"type": "boolean"}, "nothing": {"type": "null"}, "x": {"type": "number"}},
        "rows": {"type": "array", "items": {"type": "array", "items": INTEGER}},
        "text": STRING,
    }
    text = "'it''s' \"x\" \\n \\\n\U0001f600"
    arguments = (
        "~<flag>true~</flag>~<nothing>null~</nothing>~<x>1.5~</x>~<rows>~<item>~<item>1~</item>"
        f"~<item>2~</item>~</item>~</rows>~<text>{text}~</text>"
    )
    [one] = parsed(block(call("f", arguments)), tools=[tool("f", **schema)]).tool_calls
    expected = {"flag": True, "nothing": None, "x": 1.5, "rows": [[1, 2]], "text": text}
    assert same(json.loads(one.arguments), expected)
    assert "\U0001f600" in one.arguments


def test_arguments_of_one_name_in_a_row_are_a_list():
    [one] = parsed(
        block(call("f", "~<a>1~</a>\n~<a>2~</a>~<b>3~</b>")),
        tools=[tool("f", a={"type": "array", "items": INTEGER}, b=INTEGER)],
    ).tool_calls
    assert same(json.loads(one.arguments), {"a": [1, 2], "b": 3}) and one.complete


def test_a_nullable_string_streams_once_it_cannot_be_null():
    text = block(call("f", "~<x>nullify~</x>"))
    place = text.index("nullify")
    pieces = [text[:place], *"nullify", text[place + 7 :]]
    texts = [event.text for event in events(pieces, tools=[tool("f", x=NULLABLE)])[1:-1]]
    assert texts == ['{"x": ', '"nulli', "f", "y", '"}']


def test_schemas_with_booleans_defaults_and_unions_are_accepted():
    """F52."""
    parameters = {
        "properties": {
            "force": {"type": "boolean", "default": False},
            "limit": {"anyOf": [INTEGER, {"type": "null"}], "default": None},
            "anything": True,
            "nothing": False,
        }
    }
    tools = [{"name": "f", "parameters": parameters}]
    arguments = "~<force>true~</force>~<limit>null~</limit>~<anything>1~</anything>"
    [one] = parsed(block(call("f", arguments)), tools=tools).tool_calls
    assert same(json.loads(one.arguments), {"force": True, "limit": None, "anything": "1"})


def test_references_are_followed_and_may_be_recursive():
    node = {"type": "object", "properties": {"v": INTEGER, "next": {"$ref": "#/$defs/Node"}}}
    parameters = {
        "$defs": {"Node": {"anyOf": [node, {"type": "null"}]}, "a/b": INTEGER},
        "properties": {"x": {"$ref": "#/$defs/Node"}, "y": {"$ref": "#/$defs/a~1b"}},
    }
    arguments = "~<x>~<v>1~</v>~<next>~<v>2~</v>~<next>null~</next>~</next>~</x>~<y>3~</y>"
    tools = [{"name": "f", "parameters": parameters}]
    [one] = parsed(block(call("f", arguments)), tools=tools).tool_calls
    expected = {"x": {"v": 1, "next": {"v": 2, "next": None}}, "y": 3}
    assert same(json.loads(one.arguments), expected)


LOOP: dict[str, Any] = {"$ref": "#/properties/x"}


@pytest.mark.parametrize(
    "schema",
    [
        *(None, 5, "string", [], {"type": 5}, {"type": ["string", ["x"]]}, {"type": "thing"}),
        *({"properties": []}, {"items": 5}, {"anyOf": "x"}, {"anyOf": [5, None]}, {"enum": 5}),
        *(LOOP, {"$ref": "#/nowhere/1"}, {"$ref": "#/properties/x/prefixItems/9"}, {"$ref": "x"}),
        *({"anyOf": [LOOP, LOOP]}, {"allOf": [{"$ref": "#"}]}, {"enum": [object()]}),
    ],
)
def test_schemas_that_make_no_sense_allow_everything(schema):
    for text in ("a", "~<a>1~</a>", "~<item>1~</item>", ""):
        argument(text, schema)


def test_a_schema_that_branches_at_every_step_costs_no_more_than_its_size():
    definitions: dict[str, Any] = {"0": INTEGER}
    for index in range(1, 60):
        earlier = {"$ref": f"#/$defs/{index - 1}"}
        definitions[str(index)] = {"anyOf": [earlier, earlier]}
    parameters = {"$defs": definitions, "properties": {"x": {"$ref": "#/$defs/59"}}}
    tools = [{"name": "f", "parameters": parameters}]
    [one] = parse_reply(block(call("f", "~<x>5~</x>")), tools=tools).tool_calls
    assert one.arguments == '{"x": 5}'


def test_nesting_has_a_bound_beyond_which_tags_are_text():
    deep = "~<a>" * 500 + "x" + "~</a>" * 500
    [one] = parse_reply(block(call("f", deep)), tools=[tool("f")]).tool_calls
    value, depth = json.loads(one.arguments), 0
    while isinstance(value, dict):
        value, depth = value["a"], depth + 1
    assert depth == 128 and value == spelled("~<a>" * 372 + "x")


@pytest.mark.parametrize(
    "bad", [{"function": "f"}, {"type": "function"}, {"function": {"name": 5}}, {}]
)
def test_a_tool_without_a_name_is_refused(bad):
    with pytest.raises(ValueError, match="tool 1 must be an object that names its function"):
        ReplyParser(tools=[tool("f"), bad])


def test_a_finished_reply_takes_no_more():
    parser = ReplyParser()
    parser.feed("a")
    parser.finish()
    with pytest.raises(ValueError, match="the reply is finished, and got more text: 'b'"):
        parser.feed("b")
    with pytest.raises(ValueError, match="the reply is finished already"):
        parser.finish()
