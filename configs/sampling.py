"""How the tokens of a sequence are drawn: the options that a request and a row of a batch share,
their names and their ranges.

A request (`serving.scheduling.sampling_params`) adds when it ends and what it reports, a row
(`minimax_jax.sampling.params`) the seed and the ids that stand for the request's words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class TokenSampling:
    """Temperature 0 is greedy; top_k 0 or -1, top_p 1, min_p 0, penalties of 0 (repetition: 1) and
    empty collections switch off. None of `stop_token_ids` is drawn before `min_tokens` others.
    Raises ValueError with a sentence.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        _check_shape(self)
        _check_penalties(self)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids is empty: nothing could be drawn")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens={self.min_tokens} is negative")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the next one's distribution."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def check_vocabulary(self, num_tokens: int) -> None:
        """Raises ValueError when an id is named that is not a token."""
        for name, ids in self._named_ids().items():
            for token in ids:
                if not 0 <= token < num_tokens:
                    raise ValueError(f"{name} names token {token}, not in 0..{num_tokens - 1}")

    def _named_ids(self) -> dict[str, Sequence[int]]:
        return {
            "logit_bias": list(self.logit_bias),
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids,
        }


def check_seed(seed: int) -> None:
    """Raises ValueError for a seed that 63 bits do not hold."""
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed={seed} is not in 0..2^63-1")


def _check_shape(params: TokenSampling) -> None:
    if not 0 <= params.temperature < float("inf"):
        raise ValueError(f"temperature={params.temperature} is not a number from 0 on")
    if not 0 < params.top_p <= 1:
        raise ValueError(f"top_p={params.top_p} is not in (0, 1]")
    if params.top_k < -1:
        raise ValueError(f"top_k={params.top_k} is neither -1, 0 nor a number of tokens")
    if not 0 <= params.min_p <= 1:
        raise ValueError(f"min_p={params.min_p} is not in [0, 1]")


def _check_penalties(params: TokenSampling) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        if not -2 <= value <= 2:
            raise ValueError(f"{name}={value} is not in [-2, 2]")
    if not 0 < params.repetition_penalty < float("inf"):
        raise ValueError(f"repetition_penalty={params.repetition_penalty} is not above 0")
    for token, bias in params.logit_bias.items():
        if not -100 <= bias <= 100:
            raise ValueError(f"logit_bias of token {token} is {bias}, not in [-100, 100]")
