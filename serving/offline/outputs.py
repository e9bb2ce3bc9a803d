"""What offline generation returns, under the names that vLLM's users know."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8

from minimax_jax.chat import Tokenizer
from serving.engine_api import Logprobs, Output
from serving.scheduling.request import FinishReason
from serving.scheduling.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """That of one token at one place. The likeliest has rank 1; that of a token which is not among
    the likeliest that were asked for is None.
    """

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One continuation of a prompt. `text` is None without a tokenizer.

    `stop_reason` is the stop string or the id in `stop_token_ids` that ended it, None at the
    model's own end. `error` says what happened where the finish reason is "error". With
    `enable_return_routed_experts=True` it has the experts of all tokens but the last, the prompt's
    first; that one was never run.
    """

    index: int
    text: str | None
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    error: str = ""
    routed_experts: UInt8[np.ndarray, "tokens layers X"] | None = None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A prompt with all its continuations. `prompt` is its text, if it came as one."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        """Always: offline generation returns whole outputs."""
        return True


def completion(
    outputs: Sequence[Output], sampling: SamplingParams, tokenizer: Tokenizer | None
) -> CompletionOutput:
    """One sequence's outputs, added up."""
    ids = [token for output in outputs for token in output.token_ids]
    end, entries, total = outputs[-1], None, None
    if sampling.logprobs is not None:
        parts = [output.logprobs for output in outputs if output.logprobs is not None]
        entries = [_entry(part, i, tokenizer) for part in parts for i in range(len(part.token_ids))]
        total = sum(value for part in parts for value in part.values if value is not None)
    return CompletionOutput(
        index=end.index,
        text=None if tokenizer is None else text_of(ids, end, sampling, tokenizer),
        token_ids=ids,
        finish_reason=end.finish_reason,
        stop_reason=end.matched_stop,
        logprobs=entries,
        cumulative_logprob=total,
        error=end.error,
        routed_experts=end.experts,
    )


def prompt_logprobs(
    outputs: Sequence[Output], tokenizer: Tokenizer | None
) -> list[dict[int, Logprob] | None] | None:
    """Those of the prompt, if they were asked for; None for its first token."""
    for output in outputs:
        given = output.prompt_logprobs
        if given is not None:
            rest = [_entry(given, i, tokenizer) for i in range(1, len(given.token_ids))]
            return [None, *rest]
    return None


def text_of(ids: Sequence[int], end: Output, sampling: SamplingParams, tokenizer: Tokenizer) -> str:
    """The text of a whole sequence, without what ended it unless that is to be included."""
    includes, stop = sampling.include_stop_str_in_output, end.matched_stop
    if end.finish_reason == "stop" and not isinstance(stop, str) and not includes:
        own = (*sampling.stop_token_ids, *tokenizer.stop_ids)
        ids = ids[:-1] if ids and ids[-1] in own else ids
    text = _decoded(ids, sampling, tokenizer)
    if not isinstance(stop, str):
        return text
    # It was completed by the last token, and its first completion counts.
    before = len(_decoded(ids[:-1], sampling, tokenizer).rstrip("\ufffd"))
    first = len(_decoded(ids[: sampling.min_tokens], sampling, tokenizer))
    place = text.find(stop, max(0, first, before - len(stop) + 1))
    return text[: place + len(stop) * includes] if place >= 0 else text


def _decoded(ids: Sequence[int], sampling: SamplingParams, tokenizer: Tokenizer) -> str:
    hidden = tokenizer.special_ids if sampling.skip_special_tokens else ()
    return tokenizer.decode(token for token in ids if token not in hidden)


def _entry(given: Logprobs, place: int, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The likeliest tokens at a place and the one that is there, which comes first."""
    tops = dict(zip(given.top_ids[place], given.top_values[place], strict=True))
    ranks = {token: rank for rank, token in enumerate(tops, start=1)}
    value = given.values[place]
    assert value is not None
    values = {given.token_ids[place]: value} | tops
    return {
        token: Logprob(
            logprob=value,
            rank=ranks.get(token),
            decoded_token=None if tokenizer is None else tokenizer.decode([token]),
        )
        for token, value in values.items()
    }
