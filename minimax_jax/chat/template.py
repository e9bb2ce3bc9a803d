"""Chat messages to prompt text, by the checkpoint's own `chat_template.jinja`.

A template is somebody else's program, so it runs in jinja2's immutable sandbox, sees plain JSON
data alone, and gets the same few helpers that Hugging Face gives it (`tojson` without HTML escapes,
`raise_exception`, `strftime_now`, `break`/`continue`, the `generation` block). Messages are checked
before the template sees them.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minimax_jax.chat.messages import Message, check_messages, normalised, plain_data

TEMPLATE_FILE = "chat_template.jinja"


class ChatTemplate:
    """A compiled chat template.

    `special_tokens` are handed to the template by name, `bos_token` and `eos_token` for two.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template does not compile: {error}") from error

    @staticmethod
    def is_in(folder: str | Path) -> bool:
        """Whether `load` would find a template in a folder."""
        config = _read_json(Path(folder) / "tokenizer_config.json")
        return (Path(folder) / TEMPLATE_FILE).is_file() or "chat_template" in config

    @classmethod
    def load(cls, folder: str | Path) -> "ChatTemplate":
        """Reads `chat_template.jinja`, or the field `chat_template` of tokenizer_config.json."""
        folder = Path(folder)
        config = _read_json(folder / "tokenizer_config.json")
        path = folder / TEMPLATE_FILE
        source = path.read_text("utf-8") if path.is_file() else config.get("chat_template")
        if not isinstance(source, str):
            raise ValueError(f"{folder} holds no chat template: expected a file {TEMPLATE_FILE}")
        return cls(source, _special_tokens(config))

    def render(
        self,
        messages: Any,
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation (specification model 4.2).

        `kwargs` go to the template, `thinking_mode` for one; `enable_thinking` (a bool) is an alias
        that an explicit `thinking_mode` overrides. Raises ValueError, in one sentence, for messages
        that are malformed or that the template itself refuses.
        """
        variables = {
            **self.special_tokens,
            **plain_data(_with_thinking_mode(kwargs)),
            "messages": [normalised(message) for message in check_messages(messages)],
            "tools": None if not tools else plain_data(list(tools)),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refused the conversation: {error}") from error
        except (TypeError, AttributeError, KeyError, RecursionError, OverflowError) as error:
            raise ValueError(f"the chat template failed on the conversation: {error}") from error


def _with_thinking_mode(kwargs: dict[str, Any]) -> dict[str, Any]:
    enable = kwargs.get("enable_thinking")
    if enable is None or kwargs.get("thinking_mode") is not None:
        return kwargs
    return {**kwargs, "thinking_mode": "enabled" if enable else "disabled"}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its kind; tokenizer_config.json writes a token as a string or an object."""
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _environment() -> ImmutableSandboxedEnvironment:
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
