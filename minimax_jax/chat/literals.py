"""Text of an argument without elements in it, as the JSON of the types that its schema allows.

Where a string is allowed, text is the string, to the last space, unless it is exactly the JSON of
another type that is allowed too. Where none is, spellings of other languages are understood
(`True`, `007`). What fits no type stays a string, for the tool's own check to refuse.
(Specification model 4.4.)
"""

import json
import math
import re
from typing import NoReturn

from minimax_jax.chat.schema import Types

BLANK = " \t\r\n"
NULLS = ("null", "Null", "NULL")
TRUE = ("true", "1", "yes", "on")
FALSE = ("false", "0", "no", "off")
# Beyond this many characters readers differ in what they make of a number, or refuse it.
MAX_NUMBER = 256

_INTEGER = re.compile("-?(?:0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_ANY_INTEGER = re.compile("[+-]?[0-9]+")
_ANY_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
# Larger whole floats are not exact.
_MAX_EXACT = 2**53

string_json = json.JSONEncoder(ensure_ascii=False).encode


def leaf_json(text: str, types: Types) -> str:
    """The JSON text of a leaf. Without types only `true`, `false` and `null` are no strings."""
    if not types:
        return text if text in ("true", "false", "null") else string_json(text)
    found = _exact(text, types) if "string" in types else _lenient(text.strip(BLANK), types)
    return string_json(text) if found is None else found


def _exact(text: str, types: Types) -> str | None:
    if "null" in types and text in NULLS:
        return "null"
    if "integer" in types and _INTEGER.fullmatch(text) and _is_finite(text):
        return text
    if "number" in types and _NUMBER.fullmatch(text) and _is_finite(text):
        return text
    if "boolean" in types and text in ("true", "false"):
        return text
    return _container(text, types)


def _lenient(text: str, types: Types) -> str | None:
    if not text:
        return _empty(types)
    if (found := _exact(text, types)) is not None:
        return found
    if types & {"integer", "number"} and (found := _number(text, types)) is not None:
        return found
    if "boolean" in types and text.lower() in TRUE + FALSE:
        return "true" if text.lower() in TRUE else "false"
    return None


def _empty(types: Types) -> str | None:
    """An empty element is how an empty list or object is written."""
    if "array" in types:
        return "[]"
    if "object" in types:
        return "{}"
    return "null" if "null" in types else None


def _number(text: str, types: Types) -> str | None:
    if _ANY_NUMBER.fullmatch(text) is None or not _is_finite(text):
        return None
    if _ANY_INTEGER.fullmatch(text):
        return str(int(text))
    value = float(text)
    if "number" not in types and value.is_integer() and abs(value) <= _MAX_EXACT:
        return str(int(value))
    return repr(value)


def _is_finite(text: str) -> bool:
    return len(text) <= MAX_NUMBER and math.isfinite(float(text))


def _container(text: str, types: Types) -> str | None:
    """Lists and objects may also come as JSON text, as M2 writes them."""
    bare = text.strip(BLANK)
    kind = {"[": "array", "{": "object"}.get(bare[:1])
    if kind not in types:
        return None
    try:
        json.loads(bare, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return bare


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
