"""Conversations to token ids: the one way from a client's messages to what the model reads.

`generate`, serving and reinforcement learning all build their prompts here, so a conversation has
the same ids whichever door it came through. The template alone writes the document start.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minimax_jax.chat.control_tokens import ControlTokens
from minimax_jax.chat.rendered import Rendered
from minimax_jax.chat.template import NO_TOKENS, ChatTemplate
from minimax_jax.chat.tokenizer import Tokenizer
from minimax_jax.chat.turns import TurnMemory


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A conversation as a client sends it. In `safe` mode control tokens that messages and tools
    spell stay text; otherwise they are read as tokens.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    safe: bool = True


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt as ids; for a chat also its rendered text, whose end says whether the answer begins
    inside a thought, and the chat itself.
    """

    ids: list[int]
    text: str | None = None
    chat: Chat | None = None


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """How chats become ids: a checkpoint's template and tokenizer, and what is known of past turns.

    Without `turns`, past answers are rendered and encoded as everything else is.
    """

    template: ChatTemplate
    tokenizer: Tokenizer
    turns: TurnMemory | None = None

    def prompt(self, chat: Chat) -> Prompt:
        """The prompt that asks for the next answer. Raises ValueError as `ChatTemplate.render`."""
        rendered = self._render(chat, chat.messages, add_generation_prompt=True)
        return Prompt(ids=self._encode(rendered), text=rendered.text, chat=chat)

    def remember(self, prompt: Prompt, ids: Sequence[int], message: Mapping[str, Any]) -> None:
        """Keeps the generated `ids` of a whole answer for when its `message` is put back.

        From then on the chat's messages with `message` after them render to prompt and ids, in this
        order, and go on from there. What encoding gives anyway is not stored.
        """
        assert self.turns is not None and prompt.chat is not None
        messages = [*prompt.chat.messages, message]
        rendered = self._render(prompt.chat, messages, add_generation_prompt=False)
        ends = self.tokenizer.turn_ends(rendered)
        if not ends:
            return
        answered = rendered.until(ends[-1])
        encoded = self._encode(answered)
        stopped = len(ids) > 0 and ids[-1] in self.tokenizer.stop_ids
        generated = [*prompt.ids, *ids, *([] if stopped else encoded[-1:])]
        if generated != encoded:
            self.turns.store(answered.digests([ends[-1]])[0], generated)

    def _render(
        self, chat: Chat, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
    ) -> Rendered:
        safe: ControlTokens = self.tokenizer.control_tokens if chat.safe else NO_TOKENS
        return self.template.render_marked(
            messages,
            tools=chat.tools,
            add_generation_prompt=add_generation_prompt,
            options=chat.options,
            control_tokens=safe,
        )

    def _encode(self, rendered: Rendered) -> list[int]:
        if not self.turns:
            return self.tokenizer.encode_rendered(rendered)
        ends = self.tokenizer.turn_ends(rendered)
        known = self.turns.recall(rendered.digests(ends))
        if known is None:
            return self.tokenizer.encode_rendered(rendered)
        index, ids = known
        return ids + self.tokenizer.encode_rendered(rendered.after(ends[index]))
