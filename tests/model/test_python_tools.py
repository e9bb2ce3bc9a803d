"""Functions of a file as tools: schemas, checked calls, and errors as one line for the model."""

import json
import textwrap

import pytest

from minimax_jax.python_tools import PythonTools

SOURCE = '''
"""Two tools."""
import datetime
from dataclasses import dataclass
from textwrap import dedent
from typing import Literal

@dataclass
class Place:
    name: str
    title: str = ""

def add(a: int, b: int | None = None) -> int:
    """Adds two numbers.

    Exactly.

    Args:
        a: the first number
        b (int): the second one,
            which may be left out

    Returns:
        int: the sum
    """
    return a + (b or 0)

def look(where: list[Place], how: Literal["far", "near"] = "far", *, on: datetime.date):
    return {"where": where, "on": on}

def fails(reason: str = ""):
    raise RuntimeError(reason)

def leaves():
    raise SystemExit(3)

def text() -> str:
    return "two\\nlines"

class Other: ...

def _private(x): ...

alias = dedent
'''


@pytest.fixture
def load(tmp_path):
    def write_and_load(source=SOURCE):
        (tmp_path / "my tools.py").write_text(textwrap.dedent(source))
        return PythonTools.load(tmp_path / "my tools.py")

    return write_and_load


def test_public_functions_of_the_file_are_its_tools(load):
    names = [tool["function"]["name"] for tool in load().definitions]
    assert names == ["add", "look", "fails", "leaves", "text"]


def test_schema_comes_from_hints_and_docstring(load):
    add, look, *_ = (tool["function"] for tool in load().definitions)
    assert add["description"] == "Adds two numbers.\n\nExactly."
    assert add["parameters"] == {
        "type": "object",
        "additionalProperties": False,
        "required": ["a"],
        "properties": {
            "a": {"type": "integer", "description": "the first number"},
            "b": {
                "anyOf": [{"type": "integer"}, {"type": "null"}],
                "default": None,
                "description": "the second one, which may be left out",
            },
        },
    }
    assert look["description"] == ""
    place = look["parameters"]["$defs"]["Place"]
    assert place["properties"]["title"] == {"type": "string", "default": ""}
    assert look["parameters"]["properties"]["how"]["enum"] == ["far", "near"]


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("add", {"a": 3, "b": 4}, "7"),
        ("add", {"a": "3"}, "3"),
        ("look", {"where": [{"name": "é"}], "on": "2026-01-31"}, None),
        ("text", {}, "two\nlines"),
        ("add", {}, "error: a: Missing required argument"),
        ("add", {"a": "x"}, "error: a: Input should be a valid integer"),
        ("add", {"a": 1, "c": 2}, "error: c: Unexpected keyword argument"),
        ("fails", {"reason": "no\nmore"}, "error: RuntimeError: no"),
        ("fails", {}, "error: RuntimeError"),
        ("leaves", {}, "error: SystemExit: 3"),
        ("other", {}, "error: there is no tool 'other', only add, look"),
        ("add", [1], "error: TypeError"),
    ],
)
def test_call_gives_the_result_or_the_error_in_one_line(load, name, arguments, result):
    told = load().call(name, json.dumps(arguments))
    if result is None:
        where = {"where": [{"name": "é", "title": ""}], "on": "2026-01-31"}
        assert json.loads(told) == where and "é" in told
    else:
        assert told.startswith(result)
        assert "error" not in result or "\n" not in told


def test_arguments_that_are_no_json_are_an_error(load):
    assert load().call("add", "{").startswith("error: the arguments of add are not JSON")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("x = 1", "defines no public function"),
        ("def f(x): ...", "the tool f has no type hint for x"),
        ("def f(*x: int): ...", r"the tool f has \*x: int, which a call cannot give by name"),
        ("def f(x: int, /): ...", "the tool f has x: int, which"),
        ("async def f(): ...", "the tool f is a coroutine"),
        ("def f(x: 'Nowhere'): ...", "the tool f has hints without a schema"),
        ("class A: ...\ndef f(x: A): ...", "the tool f has hints without a schema"),
        ("1 / 0", "cannot be executed: ZeroDivisionError: division by zero"),
        ("def f(", "cannot be executed: SyntaxError"),
    ],
)
def test_file_that_has_no_tools_is_refused_in_one_sentence(load, source, sentence):
    with pytest.raises(ValueError, match=sentence) as refusal:
        load(source)
    assert "\n" not in str(refusal.value)


def test_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a Python file with tools"):
        PythonTools.load(tmp_path / "none.py")
