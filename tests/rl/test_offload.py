"""The optimiser's moments are the same wherever they are kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.rl import GRPOConfig
from rl.offload import FOLDER, Moments, peak_memory
from rl.optimizer import TrainState, make_optimizer

OPTIMIZER = make_optimizer(GRPOConfig(warmup_steps=1))
SHAPES = {"layers.0.a": (4, 32), "layers.0.b": (32, 4), "norm": (32,)}


def gradient(step):
    return {
        name: jax.random.normal(jax.random.fold_in(jax.random.key(step), i), shape)
        for i, (name, shape) in enumerate(SHAPES.items())
    }


@jax.jit
def updated(state, gradient):
    return state.updated(gradient, OPTIMIZER)


def after_three_steps(where, out):
    moments = Moments(where, out)
    state = TrainState.new({n: jnp.ones(s) for n, s in SHAPES.items()}, OPTIMIZER)
    state = moments.away(state)
    for step in range(3):
        state = moments.away(updated(moments.back(state), gradient(step)))
    return state


@pytest.mark.parametrize("where", ["host", "disk"])
def test_three_steps_are_bit_equal_wherever_the_moments_are(where, tmp_path):
    plain, other = after_three_steps("none", tmp_path), after_three_steps(where, tmp_path)
    assert jax.tree.structure(plain) == jax.tree.structure(other)
    for one, two in zip(jax.tree.leaves(plain), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(one, two)
    kept = jax.tree.leaves(other.optimizer)
    assert not any(isinstance(x, jax.Array) for x in kept)
    files = sorted(path.name for path in (tmp_path / FOLDER).glob("*"))
    assert files == (sorted(f"{i}.npy" for i in range(len(kept))) if where == "disk" else [])
    assert all(isinstance(x, np.memmap) == (where == "disk") for x in kept)


def test_what_a_checkpoint_still_reads_is_not_written_over(tmp_path):
    moments = Moments("disk", tmp_path)
    state = TrainState.new({"a": jnp.zeros(3)}, OPTIMIZER)
    first = moments.away(updated(state, {"a": jnp.ones(3)}))
    before = [np.array(x) for x in jax.tree.leaves(first.optimizer)]
    moments.away(updated(moments.back(first), {"a": jnp.ones(3)}))
    for one, two in zip(jax.tree.leaves(first.optimizer), before, strict=True):
        np.testing.assert_array_equal(one, two)


def test_the_peak_is_that_of_this_process():
    block = np.ones(1 << 22)
    assert peak_memory()["perf/cpu_memory_used_gb"] > block.nbytes / (1 << 30)
