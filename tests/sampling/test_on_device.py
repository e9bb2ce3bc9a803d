"""What a GPU runs of a step's sampling, lowered on a machine without one."""

import jax
import jax.numpy as jnp
import pytest

from minimax_jax.sampling import (
    History,
    SamplingParams,
    SamplingState,
    masked,
    processed,
    sample,
    token_logprobs,
)

B, V = 2, 3000
EVERYTHING = SamplingParams(
    temperature=0.8,
    top_p=0.9,
    top_k=40,
    min_p=0.1,
    repetition_penalty=1.1,
    logit_bias={3: 1.0},
    bad_words=((1, 2),),
    min_tokens=3,
    allowed_token_ids=(1, 2, 3),
)


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), EVERYTHING])
def test_no_choice_of_the_sampling_waits_for_the_host(params):
    """XLA records a conditional, to be decided on the device, unless a branch of it has a loop."""
    state = SamplingState.of([params] * B, [2] * B, V)
    history = History.of(state, [[1, 2]] * B, [[3]] * B, V)

    leaves, tree = jax.tree.flatten((state, history))  # shapes are no arrays for its types

    def run(logits, words, positions, leaves):
        state, history = jax.tree.unflatten(tree, leaves)
        done = processed(masked(logits, words), state, positions, history)
        token = sample(done, state, positions)
        return token, token_logprobs(logits, token, 20)

    logits, words = jnp.zeros((B, V)), jnp.zeros((B, -(-V // 32)), jnp.uint32)
    traced = jax.jit(run).trace(logits, words, jnp.arange(B), leaves)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.case" in text and "stablehlo.while" not in text
