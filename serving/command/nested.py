"""Spellings that vLLM's users type, before argparse sees them: `--config '{...}'` and
`--config.key value` as one object, underscores in names, and sizes as in 25.6k.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

# Flags whose value is an object.
OBJECTS = (
    "attention-config",
    "speculative-config",
    "quantization-config",
    "kv-events-config",
    "kv-transfer-config",
    "structured-outputs-config",
    "compilation-config",
    "limit-mm-per-prompt",
)
# Flags whose value counts tokens, sequences or bytes.
SIZES = (
    "max-model-len",
    "max-num-seqs",
    "max-num-batched-tokens",
    "max-waiting-requests",
    "max-message-bytes",
    "max-concurrent-requests",
    "num-gpu-blocks-override",
)
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmgKMG])")


def read_objects(arguments: Sequence[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """The arguments without the objects among them, and these by name.

    `--name.a.b value` sets one key, `--name.a+ value` adds to a list. Raises ValueError with one
    sentence for what is no JSON object, a key without a value, or a key inside of a value.
    """
    rest: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    left = [*arguments]
    while left:
        argument = left.pop(0)
        if argument == "--":
            return [*rest, argument, *left], objects
        flag, equals, value = argument.partition("=")
        name, dot, path = flag.removeprefix("--").partition(".")
        name = name.replace("_", "-")
        if not flag.startswith("--"):
            rest.append(argument)
        elif name in OBJECTS:
            if not equals and not left:
                raise ValueError(f"{flag} has no value")
            value = value if equals else left.pop(0)
            here = objects.setdefault(name, {})
            _set(here, path, value, flag) if dot else here.update(_object(flag, value))
        else:
            rest += [f"--{name}", *([value] if equals else [])] if not dot else [argument]
    return _with_sizes(rest), objects


def _with_sizes(arguments: Sequence[str]) -> list[str]:
    """The arguments with 25.6k as 25600 and 4K as 4096 after flags that take sizes."""
    flags = {f"--{name}" for name in SIZES}
    before = ["", *arguments]
    return [_size(a) if b in flags else a for b, a in zip(before, arguments, strict=False)]


def _size(text: str) -> str:
    match = _SIZE.fullmatch(text)
    if match is None:
        return text
    size = float(match[1]) * UNITS[match[2]]
    if size != int(size):
        raise ValueError(f"{text} is no whole number, but {size:g}")
    return str(int(size))


def _object(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{flag} {text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{flag} {text!r} is not a JSON object")
    return value


def _set(tree: dict[str, Any], path: str, text: str, flag: str) -> None:
    *parts, last = path.split(".")
    for part in parts:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ValueError(f"{flag} reaches into {part}, which was given a value")
    key, value = last.removesuffix("+"), _value(text)
    if not key:
        raise ValueError(f"{flag} names no key")
    if not last.endswith("+"):
        tree[key] = value
        return
    items = tree.setdefault(key, [])
    if not isinstance(items, list):
        raise ValueError(f"{flag} adds to {key}, which is no list")
    items.append(value)


def _value(text: str) -> Any:
    """JSON where the text is some, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
