"""Plain JSON data, so that a template meets no object with methods of its own."""

import json
from typing import Any


def plain_data(value: Any, name: str) -> Any:
    """A copy of `value` made of plain JSON types; ValueError, with its name, if it is more."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        return json.loads(text.encode("utf-8"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be plain JSON data: {error}") from error
