"""Tokens that are sent to their experts: the sums of one device, whatever the loads, none lost."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.parallel import ParallelConfig
from minimax_jax.expert_exchange import FEWEST_TOKENS, are_sent, sum_at_experts
from minimax_jax.experts import Experts
from minimax_jax.plan.hlo import collectives
from sharding import SERVE, local, make_mesh, named_sharding, with_parallel
from sharding.collectives import total
from tests.model.models import small
from tests.numerics import assert_close

pytestmark = pytest.mark.devices(8)
E, X, D, T = 16, 3, 8, 4 * 64
MESH = ParallelConfig.parse("dp4,tp2,ep")
LOADS = {
    "even": lambda key: jax.random.randint(key, (T, X), 0, E),
    "one rank has all": lambda key: jax.random.randint(key, (T, X), 6, 8),
    "one rank has none": lambda key: jax.random.randint(key, (T, X), 0, 12),
    "one expert twice": lambda key: jnp.full((T, X), 5),
}


def scaled(factors, x, experts, weights):
    """Expert e multiplies by its factor; ids beyond those that are here add nothing."""
    is_here = (experts >= 0) & (experts < len(factors))
    factor = jnp.where(is_here, factors[jnp.clip(experts, 0, len(factors) - 1)], 0.0)
    return x * jnp.sum(factor * jnp.where(is_here, weights, 0.0), axis=1)[:, None]


def at_experts(factors, x, experts, weights):
    own_sum = partial(scaled, factors)
    return total(sum_at_experts(own_sum, x, experts, weights, len(factors)), ["model"])


@pytest.mark.parametrize("load", LOADS)
def test_sums_are_those_of_one_device(load):
    of_x, of_w, of_e = jax.random.split(jax.random.key(0), 3)
    factors = jnp.arange(1.0, E + 1)
    x, weights = jax.random.normal(of_x, (T, D)), jax.random.uniform(of_w, (T, X))
    experts = LOADS[load](of_e).astype(jnp.int32)
    rows = ("batch", None)
    run = local(
        at_experts,
        in_axes=[("experts",), rows, rows, rows],
        out_axes=rows,
        rules=with_parallel(SERVE, MESH),
    )
    with jax.set_mesh(make_mesh(MESH)):
        found = jax.jit(run)(factors, x, experts, weights)
    np.testing.assert_allclose(found, scaled(factors, x, experts, weights), rtol=1e-5)


@pytest.mark.slow
def test_a_large_batch_of_many_ranks_gives_the_sums_of_one_device():
    config, parallel = small(2), ParallelConfig.parse("dep8")
    experts = Experts(config, nnx.Rngs(0))
    of_x, of_e, of_w = jax.random.split(jax.random.key(1), 3)
    shape, num = (8, FEWEST_TOKENS), config.moe.num_experts
    x = jax.random.normal(of_x, (*shape, config.hidden_size))
    ids = jnp.argsort(jax.random.uniform(of_e, (*shape, num)))[..., :4].astype(jnp.int32)
    weights = jax.random.uniform(of_w, (*shape, 4))
    rules = with_parallel(SERVE, parallel)
    assert are_sent(FEWEST_TOKENS, 4, 8)
    with jax.set_mesh(make_mesh(parallel)):
        found = jax.jit(lambda *rows: experts(*rows, rules=rules))(x, ids, weights)
    assert_close(found, jax.jit(experts)(x, ids, weights), "f32")


def test_tokens_travel_and_experts_stay():
    """F152: what ranks exchange is less than one matrix of one expert, and a rank has its own."""
    config, parallel = small(2), ParallelConfig.parse("dp2,tp2,ep")
    rules, mesh = with_parallel(SERVE, parallel), make_mesh(parallel)
    experts = Experts(config, nnx.Rngs(0))
    for linear in (experts.w1, experts.w2, experts.w3):
        value, axes = linear.weight.get_value(), linear.weight.axes
        linear.weight.set_value(
            jax.device_put(value, named_sharding(mesh, axes, rules, value.shape))
        )
    rows = (
        jnp.ones((4, 2, config.hidden_size)),
        jnp.zeros((4, 2, X), jnp.int32),
        jnp.ones((4, 2, X)),
    )
    with jax.set_mesh(mesh):
        step = jax.jit(lambda experts, *rows: experts(*rows, rules=rules)).lower(experts, *rows)
    program = step.compile().as_text()
    assert program is not None and f"f32[{config.moe.num_experts // 4},32,64]" in program
    matrix = 4 * config.moe.expert_dim * config.hidden_size
    sent = [one.nbytes for one in collectives(program)]
    assert sent and max(sent) < matrix


def test_the_rule_sends_large_batches_over_many_ranks():
    assert are_sent(FEWEST_TOKENS, 4, 5) and not are_sent(FEWEST_TOKENS, 4, 4)
    assert not are_sent(FEWEST_TOKENS - 1, 4, 8)
