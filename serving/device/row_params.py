"""A request's options as those of a row: words as token ids, all its ends together."""

from collections.abc import Sequence
from dataclasses import fields

from configs.sampling import TokenSampling
from minimax_jax.bad_words import bad_word_ids
from minimax_jax.chat import Tokenizer
from minimax_jax.sampling import SamplingParams as RowParams
from serving.scheduling.sampling_params import SamplingParams

_SHARED = [field.name for field in fields(TokenSampling) if field.name != "stop_token_ids"]


def row_params(
    asked: SamplingParams, *, seed: int, stop_ids: Sequence[int], tokenizer: Tokenizer | None
) -> RowParams:
    """Raises ValueError with a sentence for bad words without a tokenizer."""
    words = ()
    if asked.bad_words:
        if tokenizer is None:
            raise ValueError("bad_words need a tokenizer, and the model has none")
        words = bad_word_ids(tokenizer, asked.bad_words)
    shared = {name: getattr(asked, name) for name in _SHARED}
    return RowParams(**shared, stop_token_ids=tuple(stop_ids), seed=seed, bad_words=words)
