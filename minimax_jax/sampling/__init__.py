"""The law of sampling: from a row of logits to one token, per sequence, on the device.

In vLLM's order (spec/serving 6): the grammar's mask, then log-probabilities as they are reported
(`logprobs`), then allowed ids, bad words, too early stops and biases (`edits`), penalties
(`penalties`), temperature, min-p, top-k, top-p (`law`, `cuts`), and one draw from a sequence's own
seed and position (`draws`). What a sequence asks for is `SamplingParams`; `SamplingState` is that
of a batch, and `History` what penalties and bad words have to know of the tokens so far.
"""

from minimax_jax.sampling.draws import ACCEPT, DRAFT, TOKEN, draw, uniform
from minimax_jax.sampling.history import History
from minimax_jax.sampling.law import is_undecided, probabilities, processed, sample
from minimax_jax.sampling.logprobs import TokenLogprobs, chunked_logprobs, token_logprobs
from minimax_jax.sampling.masks import masked, packed_mask
from minimax_jax.sampling.params import SamplingOptions, SamplingParams
from minimax_jax.sampling.state import SamplingState, is_stop

__all__ = [
    "ACCEPT",
    "DRAFT",
    "TOKEN",
    "History",
    "SamplingOptions",
    "SamplingParams",
    "SamplingState",
    "TokenLogprobs",
    "chunked_logprobs",
    "draw",
    "is_stop",
    "is_undecided",
    "masked",
    "packed_mask",
    "probabilities",
    "processed",
    "sample",
    "token_logprobs",
    "uniform",
]
