"""How one sequence is sampled, as its user says it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

MAX_SEED = 2**63 - 1


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams` that are numbers or ids, as keywords."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int] | None
    min_tokens: int
    stop_token_ids: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one sequence is sampled. Temperature 0 is greedy; top_k 0 or -1, top_p 1, min_p 0,
    penalties of 0 (repetition: 1) and empty collections switch off. Raises ValueError.

    A bad word is a sequence of ids that the output never completes. None of `stop_token_ids`, the
    model's own ends among them, is drawn before `min_tokens` others.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[Sequence[int]] = ()
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        _check_shape(self)
        _check_penalties(self)
        _check_ids(self)

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the next one's distribution."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def has_edits(self) -> bool:
        """Whether single ids are forbidden or biased."""
        edits = self.logit_bias, self.bad_words, self.min_tokens
        return self.allowed_token_ids is not None or any(map(bool, edits))

    def check_vocabulary(self, num_tokens: int) -> None:
        """Raises ValueError when an id is named that is not a token."""
        named = {
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids,
            "bad_words": [token for word in self.bad_words for token in word],
        }
        for name, ids in named.items():
            for token in ids:
                if not 0 <= token < num_tokens:
                    raise ValueError(f"{name} names token {token}, not in 0..{num_tokens - 1}")


def _check_shape(params: SamplingParams) -> None:
    if not 0 <= params.temperature < float("inf"):
        raise ValueError(f"temperature={params.temperature} is not a number from 0 on")
    if not 0 < params.top_p <= 1:
        raise ValueError(f"top_p={params.top_p} is not in (0, 1]")
    if params.top_k < -1:
        raise ValueError(f"top_k={params.top_k} is neither -1, 0 nor a number of tokens")
    if not 0 <= params.min_p <= 1:
        raise ValueError(f"min_p={params.min_p} is not in [0, 1]")
    if not 0 <= params.seed <= MAX_SEED:
        raise ValueError(f"seed={params.seed} is not in 0..2^63-1")


def _check_penalties(params: SamplingParams) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        if not -2 <= value <= 2:
            raise ValueError(f"{name}={value} is not in [-2, 2]")
    if not 0 < params.repetition_penalty < float("inf"):
        raise ValueError(f"repetition_penalty={params.repetition_penalty} is not above 0")
    for token, bias in params.logit_bias.items():
        if not -100 <= bias <= 100:
            raise ValueError(f"logit_bias of token {token} is {bias}, not in [-100, 100]")


def _check_ids(params: SamplingParams) -> None:
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise ValueError("allowed_token_ids is empty: nothing could be drawn")
    if not all(params.bad_words):
        raise ValueError(f"bad_words={params.bad_words} has a word of no tokens")
    if params.min_tokens < 0:
        raise ValueError(f"min_tokens={params.min_tokens} is negative")
