"""How one row of a batch is sampled: what its user asked for, as ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from configs.sampling import TokenSampling, check_seed


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
class SamplingParams(TokenSampling):
    """The options of a row, all ends among its `stop_token_ids`, the model's own too.

    A bad word is a sequence of ids that the output never completes. Raises ValueError.
    """

    seed: int = 0
    bad_words: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(self.seed)
        if not all(self.bad_words):
            raise ValueError(f"bad_words={self.bad_words} has a word of no tokens")

    @property
    def has_edits(self) -> bool:
        """Whether single ids are forbidden or biased."""
        edits = self.logit_bias, self.bad_words, self.min_tokens
        return self.allowed_token_ids is not None or any(map(bool, edits))

    def _named_ids(self) -> dict[str, Sequence[int]]:
        words = [token for word in self.bad_words for token in word]
        return super()._named_ids() | {"bad_words": words}
