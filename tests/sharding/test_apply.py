"""Shardings by name, on eight CPU devices."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from configs.parallel import ParallelConfig
from sharding import SERVE, constrain, local, make_mesh, named_sharding
from sharding.collectives import device_rank, gathered, rank, ranks, scattered_total, total
from tests.numerics import assert_close

pytestmark = pytest.mark.devices(8)
MESH = ParallelConfig(dp=2, tp=4)


@pytest.fixture
def mesh():
    return make_mesh(MESH)


def test_named_sharding_splits_by_name(mesh):
    sharding = named_sharding(mesh, ("embed", "heads", "head_dim"), SERVE, (16, 8, 32))
    assert sharding == NamedSharding(mesh, P(None, "model", None))


def test_kv_heads_fewer_than_ranks_are_replicated(mesh):
    """F145."""
    sharding = named_sharding(mesh, ("embed", "kv_heads", "head_dim"), SERVE, (16, 2, 32))
    assert sharding == NamedSharding(mesh, P(None, None, None))


def test_an_uneven_dimension_is_refused(mesh):
    sentence = "^axis 'vocab' of size 510 is not a multiple of its 4 shards over 'model'$"
    with pytest.raises(ValueError, match=sentence):
        named_sharding(mesh, ("vocab", "embed"), SERVE, (510, 16))


def test_names_must_match_the_dimensions(mesh):
    with pytest.raises(ValueError, match="name 1 dimensions, but the shape is"):
        named_sharding(mesh, ("embed",), SERVE, (16, 16))


def test_constrain_shards_inside_a_jitted_step(mesh):
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: constrain(2 * x, "batch", "mlp"))(jnp.ones((4, 8)))
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2)
    assert_close(y, jnp.full((4, 8), 2.0), "exact")


def test_constrain_leaves_a_lone_sequence_whole(mesh):
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: constrain(x, "batch", "mlp"))(jnp.ones((1, 8)))
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "model")), 2)


def test_constrain_without_a_mesh_or_on_one_device_returns_its_argument():
    x = jnp.ones((3, 5))
    assert constrain(x, "batch", "mlp") is x
    with jax.set_mesh(make_mesh(ParallelConfig())):
        assert constrain(x, "batch", "mlp") is x


def test_local_runs_on_shards_and_its_collectives_know_the_mesh(mesh):
    def row_parallel(x_BF, w_FD):
        assert x_BF.shape == (2, 2) and w_FD.shape == (2, 3)
        return jax.lax.psum(constrain(x_BF, "batch", "mlp") @ w_FD, "model")

    x_BF = jnp.arange(32.0).reshape(4, 8)
    w_FD = jnp.arange(24.0).reshape(8, 3)
    axes = {"in_axes": [("batch", "mlp"), ("mlp", "embed")], "out_axes": ("batch", "embed")}
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x, w: local(row_parallel, **axes)(x, w))(x_BF, w_FD)
    assert_close(y, x_BF @ w_FD, "f32")


@pytest.mark.parametrize("parallel", [None, ParallelConfig()])
def test_local_on_one_device_is_the_function_itself_and_collectives_have_nothing_to_do(parallel):
    def everything(x):
        assert ranks("model") == 1 and rank("data") == 0 and device_rank() == 0
        return total(scattered_total(gathered(x, "data"), "model"))

    alone = local(everything, in_axes=[("mlp",)], out_axes=("embed",))
    with nullcontext() if parallel is None else jax.set_mesh(make_mesh(parallel)):
        assert_close(jax.jit(alone)(jnp.arange(3.0)), jnp.arange(3.0), "exact")


def test_local_keeps_whole_what_the_mesh_does_not_divide_in_the_result_too(mesh):
    """F145."""

    def heads(q_BN, k_BK):
        assert q_BN.shape == (1, 2) and k_BK.shape == (1, 2)  # 4 ranks: 2 of 8 heads, 2 whole
        return q_BN * k_BK

    axes = {"in_axes": [("batch", "heads"), ("batch", "kv_heads")], "out_axes": ("batch", "heads")}
    with jax.set_mesh(mesh):
        y = jax.jit(local(heads, **axes))(jnp.arange(8.0)[None], jnp.ones((1, 2)))
    assert_close(y, jnp.arange(8.0)[None], "exact")


def test_local_takes_axes_for_each_part_of_an_argument(mesh):
    def add(pair):
        assert pair["a"].shape == (4,) and pair["b"].shape == (2,) and pair["c"] is None
        return pair["a"] + jnp.sum(pair["b"]) + 0 * total(pair["b"])[0]

    axes = {"a": ("embed",), "b": ("mlp",), "c": ("mlp",)}
    pair = {"a": jnp.zeros(4), "b": jnp.ones(8), "c": None}
    with jax.set_mesh(mesh):
        y = jax.jit(local(add, in_axes=[axes], out_axes=("embed",)))(pair)
    assert_close(y, jnp.full(4, 2.0), "exact")


def test_collectives_know_every_device(mesh):
    def tell(x):
        x = x + device_rank()
        return gathered(x, "model")[None], total(x), scattered_total(jnp.ones(4), "model")

    with jax.set_mesh(mesh):
        out_axes = [("batch", None), (None,), ("mlp",)]
        step = jax.jit(local(tell, in_axes=[(None,)], out_axes=out_axes))
        by_rank, sums, shares = step(jnp.zeros(1))
    assert_close(by_rank, jnp.arange(8.0).reshape(2, 4), "exact")
    assert_close(sums, jnp.full(1, 28.0), "exact")
    assert_close(shares, jnp.full(4, 4.0), "exact")


def test_local_takes_pytrees_and_returns_several_results(mesh):
    def split(pair):
        return pair["a"], jax.lax.psum(pair["b"], ("data", "model"))

    pair = {"a": jnp.arange(8), "b": jnp.ones((8, 2))}
    with jax.set_mesh(mesh):
        step = local(split, in_axes=[("ranks",)], out_axes=[("ranks",), (None,)])
        whole, total = jax.jit(step)(pair)
    assert_close(whole, jnp.arange(8), "exact")
    assert_close(total, jnp.full((1, 2), 8.0), "exact")


def test_a_step_runs_the_same_on_one_and_on_eight_devices(mesh):
    @jax.jit
    def step(x, w):
        return constrain(jnp.tanh(constrain(x @ w, "batch", "mlp") @ w.T), "batch", "embed")

    x = jax.random.normal(jax.random.key(0), (4, 16))
    w = jax.random.normal(jax.random.key(1), (16, 8))
    with jax.set_mesh(make_mesh(ParallelConfig())):
        expected = step(x, w)
    with jax.set_mesh(mesh):
        assert_close(step(x, w), expected, "f32")
