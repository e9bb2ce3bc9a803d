"""What a server needs of an engine, and nothing else.

All of it is called on one event loop, and no call blocks it. An engine that runs its steps in a
thread of its own hands the results over; a reader that is slow gets several results as one.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import UInt8

from serving.kv_feed import KvFeed
from serving.scheduling.request import Asked, FinishReason


class EngineError(RuntimeError):
    """The engine could not go on with a request, or not at all; the text says why."""


class EngineBusyError(RuntimeError):
    """What was asked for cannot be done while requests run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Logprobs:
    """Log-probabilities of consecutive tokens, in parallel; the first prompt token has None.

    `top_ids[i]` are the likeliest tokens at the place of `token_ids[i]`, best first, as many as
    were asked for, with `top_values[i]`; both are empty where none were.
    """

    token_ids: Sequence[int]
    values: Sequence[float | None]
    top_ids: Sequence[Sequence[int]]
    top_values: Sequence[Sequence[float]]


class Output(NamedTuple):
    """What is new of sequence `index` of a request; a tuple, since there are thousands a second and
    a frozen dataclass takes four times as long to make.

    `token_ids` and `logprobs` are those since its last output, `prompt_logprobs` come with the
    sequence's first. The last one has a `finish_reason`, and with it the totals of drafts, and in
    `matched_stop` the token id or text that was asked for as a stop and was met (None at the
    model's own end). `error` says what happened where the reason is "error". With
    `enable_return_routed_experts` it has `experts` too, if a step brought the end: those of all the
    sequence's tokens, prompt and answer, but the last, which no step has run.
    """

    prompt_tokens: int
    index: int = 0
    token_ids: Sequence[int] = ()
    cached_tokens: int = 0
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None
    draft_tokens: int = 0
    accepted_tokens: int = 0
    error: str = ""
    experts: UInt8[np.ndarray, "tokens layers X"] | None = None


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What does not change while an engine runs."""

    max_model_len: int
    vocab_size: int
    model_type: str
    architectures: tuple[str, ...]
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    default_sampling: Mapping[str, float | int] = field(default_factory=dict)
    max_num_seqs: int
    block_size: int
    data_parallel_size: int = 1
    kv_cache_dtype: str
    model_dtype: str
    attention_backend: str
    reasoning_parser: str = "minimax_m3"
    grammar_waits_for_thought: bool = True


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """Whether the engine serves; `message` says why not. A paused one admits nothing for now."""

    is_healthy: bool = True
    is_paused: bool = False
    message: str = "ok"


@dataclass(frozen=True, kw_only=True)
class RankLoad:
    """What one data rank has to do at the moment; the waiting ones of all ranks are on rank 0."""

    rank: int = 0
    num_running: int
    num_waiting: int
    waiting_uncached_tokens: int
    used_tokens: int  # held by running sequences
    max_tokens: int  # of the pool
    max_running: int
    tokens_per_second: float
    cache_hit_rate: float  # of prompt tokens, 0 to 1

    @property
    def token_usage(self) -> float:
        """The share of the pool that running sequences hold."""
        return self.used_tokens / self.max_tokens if self.max_tokens else 0.0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What is to be profiled: into `folder`, from device step `start_step` counted from now, for
    `num_steps` steps or until it is stopped.
    """

    folder: str
    start_step: int = 0
    num_steps: int | None = None
    with_python: bool = False


class Engine(Protocol):
    """Continuous batching behind a few calls."""

    @property
    def info(self) -> EngineInfo:
        """What does not change."""
        ...

    @property
    def state(self) -> EngineState:
        """Whether it serves."""
        ...

    @property
    def kv_events(self) -> KvFeed | None:
        """What happens to the blocks of the prefix cache, or None where nothing is recorded."""
        ...

    def submit(self, asked: Asked) -> AsyncIterator[Output]:
        """Queues a request at once; its outputs, each sequence's in order, until all have ended.

        Raises ValueError with a sentence for what can never run, here or before the first output
        (a grammar is compiled later), QueueFullError when too many wait, and EngineError.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request's sequences with the reason "abort" and frees what they hold, read or
        not. An unknown id is none any more.
        """
        ...

    def loads(self) -> Sequence[RankLoad]:
        """The load of each data rank."""
        ...

    async def flush(self, timeout_s: float) -> None:
        """Drops the prefix cache; waits so long for the engine to be idle, and raises
        EngineBusyError when it is not.
        """
        ...

    async def start_profile(self, profile: Profile) -> None:
        """Begins to profile; EngineBusyError while another profile runs."""
        ...

    async def stop_profile(self) -> str:
        """Ends the profile and writes it; the folder. EngineBusyError where none runs."""
        ...
