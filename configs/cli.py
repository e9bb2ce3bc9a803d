"""Dataclass fields as command-line flags, and configs from TOML files.

A field `max_tokens: int = 128` is the flag `--max-tokens`. `--config` takes the name of a preset
or a TOML file; `key=value` overrides change it, and `indexer.top_k=8` reaches into a part. Values
are written as in TOML, text without quotes, `none` for None; a type with a `parse` method, such as
ParallelConfig, takes its own text. A Python file is never executed.
"""

import argparse
import dataclasses
import tomllib
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Config = TypeVar("Config")


def described(value: Any, text: str, *aliases: str) -> Any:
    """A field with its default, the help of its flag and the flag's other names."""
    metadata = {"help": f"{text} (default {value})", "aliases": aliases}
    return dataclasses.field(default=value, metadata=metadata)


def make_parser(config_type: type, prog: str, description: str) -> argparse.ArgumentParser:
    """A parser with one flag a field; unknown and abbreviated flags are errors."""
    parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    add_flags(parser, config_type)
    return parser


def add_flags(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    config_type: type,
    *,
    without: Collection[str] = (),
) -> None:
    """Adds a flag for each field but those named, with the field's `metadata` ("help", "aliases")
    as its help and its other names.
    """
    hints = get_type_hints(config_type)
    for field in dataclasses.fields(config_type):
        if field.name in without:
            continue
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            *field.metadata.get("aliases", ()),
            dest=field.name,
            action=argparse.BooleanOptionalAction if hints[field.name] is bool else "store",
            required=_is_required(field),
            default=argparse.SUPPRESS,
            help=field.metadata.get("help"),
        )


def from_flags(config_type: type[Config], arguments: argparse.Namespace) -> Config:
    """The config that the parsed flags describe; a flag not given leaves its field's default.

    Raises ValueError with one sentence for a value that its field cannot hold.
    """
    given = vars(arguments)
    return _build(config_type, {n: given[n] for n in get_type_hints(config_type) if n in given})


def read_config(
    config_type: type[Config],
    presets: Mapping[str, Callable[[], Config]],
    source: str,
    overrides: Sequence[str] = (),
) -> Config:
    """The preset or TOML file named `source`, with the `key=value` overrides applied together.

    Raises ValueError with one sentence for an unknown name, file or key, or an impossible value.
    """
    if source in presets:
        config = presets[source]()
    elif source.endswith(".toml"):
        config = _build(config_type, _read_toml(Path(source)))
    else:
        raise ValueError(f"{source!r} is neither a TOML file nor one of {', '.join(presets)}")
    return _replace(config, _nested(overrides))


def _read_toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"there is no config file {path}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error


def _nested(overrides: Sequence[str]) -> dict[str, Any]:
    """`["a.b=1", "c=x"]` -> `{"a": {"b": "1"}, "c": "x"}`."""
    tree: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        *parts, name = key.split(".")
        branch = tree
        for part in parts:
            branch = branch.setdefault(part, {})
            if not isinstance(branch, dict):
                raise ValueError(f"{override!r} reaches into {part!r}, which was given a value")
        if not equals or isinstance(branch.get(name), dict):
            raise ValueError(f"{override!r} is not of the form key=value for a single value")
        branch[name] = text
    return tree


def _build(config_type: type[Config], values: Mapping[str, Any], path: str = "") -> Config:
    converted = _converted(config_type, values, path)
    fields = dataclasses.fields(config_type)  # pyright: ignore[reportArgumentType]
    required = [field.name for field in fields if _is_required(field)]
    missing = [path + name for name in required if name not in values]
    if missing:
        raise ValueError(f"{config_type.__name__} needs a value for {', '.join(missing)}")
    return config_type(**converted)


def _replace(config: Config, changes: Mapping[str, Any], path: str = "") -> Config:
    """Changes all fields of one part at once, so that checks see them together."""
    values: dict[str, Any] = {}
    for name, value in changes.items():
        part = getattr(config, name, None)
        if isinstance(value, Mapping) and dataclasses.is_dataclass(part):
            values[name] = _replace(part, value, f"{path}{name}.")
        else:
            values |= _converted(type(config), {name: value}, path)
    return dataclasses.replace(config, **values)  # pyright: ignore[reportArgumentType]


def _converted(config_type: type, values: Mapping[str, Any], path: str) -> dict[str, Any]:
    hints = get_type_hints(config_type)
    known = [field.name for field in dataclasses.fields(config_type)]
    for name in values:
        if name not in known:
            raise ValueError(f"{path}{name} is unknown; there are {', '.join(known)}")
    return {name: _convert(value, hints[name], path + name) for name, value in values.items()}


def _convert(value: Any, hint: Any, name: str) -> Any:
    """`value`, from TOML or as text, as the annotated type `hint`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):  # only `X | None` occurs
        inner = next(argument for argument in arguments if argument is not types.NoneType)
        return None if value in (None, "none") else _convert(value, inner, name)
    if origin is Literal:
        if value not in arguments:
            choices = ", ".join(map(str, arguments))
            raise ValueError(f"{name}={value!r} is not one of {choices}")
        return value
    if isinstance(value, Mapping) and dataclasses.is_dataclass(hint):
        return _build(hint, value, f"{name}.")  # pyright: ignore[reportArgumentType]
    if isinstance(value, str) and hasattr(hint, "parse"):
        return hint.parse(value)
    value = value if hint is str else _from_text(value, hint, name)
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(item, arguments[0], name) for item in value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise _wrong_type(value, hint, name)
    return value


def _from_text(value: Any, hint: Any, name: str) -> Any:
    """The TOML value that `value` spells if it is text; other values as they are."""
    if not isinstance(value, str):
        return value
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise _wrong_type(value, hint, name) from error


def _wrong_type(value: Any, hint: Any, name: str) -> ValueError:
    expected = hint.__name__ if isinstance(hint, type) else hint
    return ValueError(f"{name}={value!r} is not of type {expected}")


def _is_required(field: dataclasses.Field) -> bool:
    no_default = field.default is dataclasses.MISSING
    return no_default and field.default_factory is dataclasses.MISSING
