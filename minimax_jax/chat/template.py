"""Chat messages to prompt text, by the checkpoint's own `chat_template.jinja`.

Messages, tools and options are checked and levelled before the template sees them, as plain data in
a sandbox; an option that the template does not read is refused, not dropped.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta

from minimax_jax.chat.control_tokens import ControlTokens
from minimax_jax.chat.messages import level_messages
from minimax_jax.chat.plain import plain_data
from minimax_jax.chat.rendered import Rendered, escaped, unused_mark
from minimax_jax.chat.sandbox import sandbox
from minimax_jax.chat.thinking import thinking_options
from minimax_jax.chat.tools import tool_definitions

TEMPLATE_FILE = "chat_template.jinja"
NO_TOKENS = ControlTokens(())
# Two names of one switch: a template that reads either can follow it.
THINKING_NAMES = {"thinking_mode", "enable_thinking"}


class ChatTemplate:
    """A compiled chat template.

    `special_tokens` are handed to the template by name, `bos_token` and `eos_token` for two.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        environment = sandbox()
        try:
            self._template = environment.from_string(source)
            self._reads = meta.find_undeclared_variables(environment.parse(source))
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
        tools: Any = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> str:
        """The prompt text of a conversation (specification model 4.2).

        `options` go to the template, `thinking_mode` and `reasoning_effort` among them
        (`thinking.py` has their other names). Raises ValueError, in one sentence, for messages,
        tools or options that are malformed, that the template does not read, or that it refuses.
        """
        return self.render_marked(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, options=options
        ).text

    def render_marked(
        self,
        messages: Any,
        *,
        tools: Any = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any],
        control_tokens: ControlTokens = NO_TOKENS,
    ) -> Rendered:
        """The same, with a mark wherever messages, tools or options spell one of `control_tokens`
        (safe mode).
        """
        given = plain_data(thinking_options(options), "the template options")
        data = [level_messages(messages), tool_definitions(tools), given]
        self._check_read(data[1], given)
        mark = unused_mark(self.source + json.dumps(data, ensure_ascii=False))
        levelled = control_tokens.mark_messages(data[0], mark)
        tool_list, given = control_tokens.mark_whole(data[1:], mark)
        variables = {
            **self.special_tokens,
            **given,
            "messages": levelled,
            "tools": tool_list or None,
            "add_generation_prompt": add_generation_prompt,
        }
        return Rendered(marked=self._run(variables).replace(escaped(mark), mark), mark=mark)

    def _check_read(self, tools: list[Any], options: Mapping[str, Any]) -> None:
        asked = {*options, *(["tools"] if tools else [])}
        unread = asked - self._reads
        if THINKING_NAMES & self._reads:
            unread -= THINKING_NAMES
        if unread:
            known = ", ".join(sorted(self._reads))
            raise ValueError(
                f"the chat template does not read {', '.join(sorted(unread))}: it reads {known}"
            )

    def _run(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(variables)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refused the conversation: {error}") from error
        except (TypeError, AttributeError, KeyError, RecursionError, OverflowError) as error:
            raise ValueError(f"the chat template failed on the conversation: {error}") from error


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
