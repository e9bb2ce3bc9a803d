"""Rows judged some at a time: the same tokens, and memory that does not grow with all rows."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minimax_jax.sampling import SamplingParams, SamplingState
from minimax_jax.speculative.drafting import Proposal, draft_sampling
from minimax_jax.speculative.judge import Judge
from minimax_jax.speculative.steps import SpeculationOptions
from minimax_jax.speculative.verify_rows import verify_rows
from tests.model.models import tokens
from tests.speculation.runs import Run

PROMPTS = [tokens(length, seed=length) for length in (3, 17, 30)]
PARAMS = [
    SamplingParams(temperature=1.0, seed=1, top_p=0.9, presence_penalty=0.5),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, seed=2, min_tokens=5, stop_token_ids=(9,), logit_bias={3: 2.0}),
]
WIDTHS = jnp.array([7, 3, 5])


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows",
    [pytest.param(24, id="rectangle"), pytest.param(18, id="packed")],
)
def test_rows_that_are_judged_in_parts_give_the_same_tokens(rows):
    """24 rows and 21 drafts in parts of 5: neither is a multiple."""
    run = Run.of(PROMPTS, PARAMS)
    whole = SpeculationOptions(rows=rows, top_logprobs=2)
    parts = replace(whole, most_values=5 * run.config.vocab_size)
    found, wanted = (run.speculative(16, WIDTHS, options) for options in (parts, whole))
    assert found[0] == wanted[0] and any(map(len, wanted[0]))
    for ours, theirs in zip(found[1], wanted[1], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def temporary_bytes(B: int, T: int, V: int, most_values: int) -> int:
    """What XLA needs beside arguments and results of a verdict over whole blocks."""
    params = [SamplingParams(temperature=1.0, top_p=0.9, top_k=50)] * B
    sampling, shape = SamplingState.of(params), jax.ShapeDtypeStruct

    def verdict(raw, drafts, logits):
        widths = jnp.full(B, T)
        judge = Judge(
            raw=raw,
            rows=verify_rows(widths, jnp.ones(B, bool), B * (T + 1), T),
            proposal=Proposal(tokens=drafts, logits=logits, confidence=None),
            anchors=jnp.arange(B),
            history=None,
            sampling=sampling,
            drawn=draft_sampling(sampling, "probabilistic"),
            most_values=most_values,
        )
        return judge.verdict(widths)

    arguments = (
        shape((B * (T + 1), V), jnp.float32),
        shape((B, T), jnp.int32),
        shape((B, T, V), jnp.float32),
    )
    return jax.jit(verdict).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def test_memory_is_bounded_by_what_is_judged_at_once():
    B, T, V = 16, 15, 4096
    table = 4 * B * (T + 1) * V
    assert temporary_bytes(B, T, V, B * (T + 1) * V) > table, "all at once, tables of all rows"
    assert temporary_bytes(B, T, V, B * V) < table
