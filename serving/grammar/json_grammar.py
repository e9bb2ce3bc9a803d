"""JSON schemas as llguidance reads them, with white space that cannot go on for ever."""

import json
from typing import Any

# Between two tokens: nothing, a space, or a new line with its indentation. Unbounded white space is
# where a model that is unsure of its answer goes on until its tokens are spent.
WHITE_SPACE = r" |\n[ \t]{0,64}"


def json_grammar(schema: Any) -> dict[str, Any]:
    """The schema with our options. ValueError when it is neither an object nor a boolean."""
    if schema is False:
        raise ValueError("the JSON schema is false, which no value satisfies")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(f"the JSON schema is a {type(schema).__name__}, expected an object")
    return {**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE}}


def json_rule(schema: Any) -> str:
    """The schema as a part of a Lark rule."""
    return f"%json {json.dumps(json_grammar(schema))}"


def read_schema(text: str) -> Any:
    """The schema that a request holds as text."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"the JSON schema is no JSON: {error}") from error
