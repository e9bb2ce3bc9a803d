"""generate: prompts or chats in, completions (or a stream of deltas) out, in waves of sequences of
like length.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack, overload

import numpy as np

from configs.speculative import SpeculativeConfig
from minimax_jax.bad_words import bad_word_ids
from minimax_jax.chat import Chat, ChatFormat, Prompt, TurnMemory
from minimax_jax.completion import Completion, Delta
from minimax_jax.loaded import LoadedModel, check_tokens
from minimax_jax.sampling import SamplingOptions, SamplingParams
from minimax_jax.speculative.setup import config_of_call
from minimax_jax.wave import GenerateOptions, Wave

MAX_SEQUENCES = 128  # in one wave; more prompts run in further waves

PromptLike = str | Sequence[int] | Sequence[Mapping[str, Any]]


class Options(SamplingOptions, total=False):
    """The keywords of `generate` beside `stream`, for its two signatures."""

    max_tokens: int
    stop: str | Sequence[str]
    bad_words: str | Sequence[str]
    logprobs: int | None
    tools: Sequence[Mapping[str, Any]]
    template_options: Mapping[str, Any] | None
    safe: bool
    turns: TurnMemory | None
    speculative: SpeculativeConfig | bool | None


@overload
def generate(
    loaded: LoadedModel,
    prompts: PromptLike | Sequence[PromptLike],
    *,
    stream: Literal[False] = False,
    **options: Unpack[Options],
) -> list[Completion]: ...


@overload
def generate(
    loaded: LoadedModel,
    prompts: PromptLike | Sequence[PromptLike],
    *,
    stream: Literal[True],
    **options: Unpack[Options],
) -> Iterator[Delta]: ...


def generate(
    loaded: LoadedModel,
    prompts: PromptLike | Sequence[PromptLike],
    *,
    max_tokens: int = 256,
    stop: str | Sequence[str] = (),
    bad_words: str | Sequence[str] = (),
    logprobs: int | None = None,
    stream: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    template_options: Mapping[str, Any] | None = None,
    safe: bool = True,
    turns: TurnMemory | None = None,
    speculative: SpeculativeConfig | bool | None = None,
    **sampling: Unpack[SamplingOptions],
) -> list[Completion] | Iterator[Delta]:
    """Completions in the order of the prompts, or with `stream` an iterator of `Delta`.

    A prompt is text, token ids, or a chat (a list of messages); one alone or a list. `sampling` is
    any of `SamplingOptions`, its defaults those of `SamplingParams`; sequence i draws with
    seed + i, temperature 0 is greedy, and the model's own stop ids go with `stop_token_ids`.
    `stop` strings match anywhere in what is generated, the thought included; `bad_words` are texts
    that are never completed.

    Chats are rendered by the checkpoint's template, with `tools` (OpenAI's or Anthropic's
    definitions) and `template_options` (`thinking_mode`, `reasoning_effort`). Control tokens that
    messages spell stay text while `safe`. With `turns`, answers are remembered there, and a chat
    that goes on from one begins with the very ids that were generated.

    A model that was loaded to speculate does so unless `speculative` is False; another config than
    the load's may be given. It changes no distribution, and no greedy token.

    Raises ValueError with one sentence before anything runs: an empty prompt, one longer than the
    context, an impossible option.
    """
    options = GenerateOptions(
        max_tokens=max_tokens,
        stop=_texts(stop),
        logprobs=logprobs,
        speculative=config_of_call(loaded.speculation, speculative),
    )
    params = _sampling_params(loaded, _texts(bad_words), sampling)
    asked = Chat(messages=(), tools=tools, options=template_options or {}, safe=safe)
    read = [read_prompt(loaded, one, asked, turns) for one in _as_list(prompts)]
    if (template_options or tools) and all(one.chat is None for one in read):
        name = "tools" if tools else "template_options"
        raise ValueError(f"{name} are given, but no prompt is a chat")
    _check(loaded, read, options, params)
    deltas = _waves(loaded, read, params, options)
    deltas = deltas if turns is None else _remembered(loaded, read, turns, deltas)
    if stream:
        return deltas
    done = {d.index: d.completion for d in deltas if d.completion is not None}
    return [done[i] for i in range(len(read))]


def read_prompt(
    loaded: LoadedModel, prompt: PromptLike, asked: Chat, turns: TurnMemory | None = None
) -> Prompt:
    """A prompt's ids; a chat is asked as `asked`, its messages aside. Raises ValueError when it
    needs a tokenizer or template that the checkpoint lacks.
    """
    if not isinstance(prompt, str) and all(
        isinstance(token, (int, np.integer)) for token in prompt
    ):
        return Prompt(ids=[int(token) for token in prompt])  # type: ignore[arg-type]
    if loaded.tokenizer is None:
        raise ValueError(f"{loaded.folder} has no tokenizer.json: give prompts as token ids")
    if isinstance(prompt, str):
        return Prompt(ids=loaded.tokenizer.encode(prompt))
    return _chat_format(loaded, turns).prompt(replace(asked, messages=tuple(prompt)))


def _chat_format(loaded: LoadedModel, turns: TurnMemory | None) -> ChatFormat:
    if loaded.template is None or loaded.tokenizer is None:
        raise ValueError(f"{loaded.folder} has no chat template: give prompts as text")
    return ChatFormat(template=loaded.template, tokenizer=loaded.tokenizer, turns=turns)


def _remembered(
    loaded: LoadedModel, prompts: list[Prompt], turns: TurnMemory, deltas: Iterator[Delta]
) -> Iterator[Delta]:
    """The deltas; each whole answer to a chat is remembered before its last delta is out."""
    for delta in deltas:
        done = delta.completion
        if done is not None and done.message is not None and done.is_whole:
            answer, prompt = done.message.to_dict(), prompts[delta.index]
            _chat_format(loaded, turns).remember(prompt, done.token_ids, answer)
        yield delta


def _texts(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _sampling_params(
    loaded: LoadedModel, bad_words: tuple[str, ...], sampling: SamplingOptions
) -> SamplingParams:
    """The settings of every sequence, stop ids of the model among them."""
    tokenizer, words = loaded.tokenizer, ()
    if bad_words:
        if tokenizer is None:
            raise ValueError(f"bad words need a tokenizer, and {loaded.folder} has none")
        words = bad_word_ids(tokenizer, bad_words)
    params = SamplingParams(**sampling, bad_words=words)
    own = () if tokenizer is None else tokenizer.stop_ids
    return replace(params, stop_token_ids=(*own, *params.stop_token_ids))


def _as_list(prompts: Any) -> list[PromptLike]:
    """One prompt or several: text, a list of ids and a list of messages are one each."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise ValueError(f"prompts of type {type(prompts).__name__} are not text, ids or messages")
    if not len(prompts):
        raise ValueError("there are no prompts")
    alone = isinstance(prompts[0], (int, np.integer, Mapping))
    return [prompts] if alone else list(prompts)  # type: ignore[list-item]


def _check(
    loaded: LoadedModel, prompts: list[Prompt], options: GenerateOptions, params: SamplingParams
) -> None:
    config = loaded.config
    params.check_vocabulary(config.num_tokens)
    if options.max_tokens < 1:
        raise ValueError(f"max_tokens={options.max_tokens} is not at least 1")
    if params.min_tokens > options.max_tokens:
        raise ValueError(
            f"min_tokens={params.min_tokens} is more than max_tokens={options.max_tokens}"
        )
    if options.logprobs is not None and not 0 <= options.logprobs <= config.num_tokens:
        raise ValueError(f"logprobs={options.logprobs} is not in 0..{config.num_tokens}")
    if "" in options.stop:
        raise ValueError("a stop string is empty")
    if options.stop and loaded.tokenizer is None:
        raise ValueError(f"stop strings need a tokenizer, and {loaded.folder} has none")
    for i, prompt in enumerate(prompts):
        if not prompt.ids:
            raise ValueError(f"prompt {i} is empty")
        check_tokens(np.asarray(prompt.ids), config)
        total = len(prompt.ids) + options.max_tokens
        if total > config.max_context:
            raise ValueError(
                f"prompt {i} has {len(prompt.ids)} tokens, which with max_tokens="
                f"{options.max_tokens} is more than the context of {config.max_context}"
            )


def _waves(
    loaded: LoadedModel, prompts: list[Prompt], sampling: SamplingParams, options: GenerateOptions
) -> Iterator[Delta]:
    """Runs all prompts, those of like length together."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
    for first in range(0, len(order), MAX_SEQUENCES):
        rows = order[first : first + MAX_SEQUENCES]
        params = [replace(sampling, seed=(sampling.seed + i) % 2**63) for i in rows]
        wave = Wave(loaded, [prompts[i] for i in rows], params, options)
        while wave.running:
            yield from (replace(delta, index=rows[delta.index]) for delta in wave.advance())
