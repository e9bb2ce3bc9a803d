"""Tokens drawn from logits that ranks share out by the vocabulary."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from configs.parallel import ParallelConfig
from minimax_jax.sampling import SamplingParams, SamplingState
from minimax_jax.steps import DecodeState, next_token
from sharding import SERVE, make_mesh, named_sharding

pytestmark = pytest.mark.devices(8)
B, V = 4, 1024
_COLLECTIVE = re.compile(r" (all-\w+|collective-permute|reduce-scatter)(-start)?\(")


def test_logits_travel_once_and_no_branch_waits_for_another_rank():
    """A conditional with a collective in a branch is decided by the host: a round trip a token."""
    mesh = make_mesh(ParallelConfig.parse("tp4"))
    params = [SamplingParams(temperature=t, top_k=40, top_p=0.9) for t in (0.0, 0.5, 1.0, 2.0)]
    logits = np.random.default_rng(0).standard_normal((B, V), np.float32)
    lies = named_sharding(mesh, ("batch", "vocab"), SERVE, logits.shape)

    leaves, tree = jax.tree.flatten(SamplingState.of(params))

    def run(logits, leaves):
        state = DecodeState(
            logits=logits,
            positions=jnp.arange(B),
            limits=jnp.full(B, 9),
            running=jnp.ones(B, bool),
        )
        return next_token(state, jax.tree.unflatten(tree, leaves), 3)

    expected = jax.jit(run)(logits, leaves)
    with jax.set_mesh(mesh):
        split = jax.device_put(logits, lies)
        whole = jax.device_put(leaves, NamedSharding(mesh, PartitionSpec()))
        program = jax.jit(run).lower(split, whole).compile()
        found = program(split, whole)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    before, entry = program.as_text().split("ENTRY ")
    assert " conditional(" in entry and not _COLLECTIVE.search(before)
    assert "all-gather" in [found[1] for found in _COLLECTIVE.finditer(entry)]
