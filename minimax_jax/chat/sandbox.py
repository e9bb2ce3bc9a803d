"""The sandbox that templates run in.

A template is somebody else's program, so it runs in jinja2's immutable sandbox and gets the same
few helpers that Hugging Face gives it (`tojson` without HTML escapes, `raise_exception`,
`strftime_now`, `break`/`continue`, the `generation` block).
"""

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


def sandbox() -> ImmutableSandboxedEnvironment:
    """A fresh environment for one template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=_make_dict,
        namespace=_GuardedNamespace,
    )
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text; here its body is rendered."""

    tags: set[str] = {"generation"}  # noqa: RUF012 (jinja2 declares it on the class)

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _GuardedNamespace(jinja2.utils.Namespace):
    """A `namespace` that stores no underscore names, which would otherwise shadow Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # `self` stays out of the signature so that a template may write namespace(self=...).
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace must not hold {name!r}")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
