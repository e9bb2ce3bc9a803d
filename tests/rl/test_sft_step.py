"""What one step does: which loss reaches which parameters, and how the experts are balanced."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minimax_jax.context import Context
from rl.cross_entropy import token_losses
from rl.expert_balance import SHARE, balanced_bias, expert_loads
from rl.indexer_loss import Queries, block_mass, index_scores, indexer_loss
from rl.pack_stream import make_pack
from rl.sft_step import Program, new_state
from tests.numerics import assert_close
from tests.rl.toy import toy_run


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """A program, its first parameters and a pack."""
    run = toy_run(tmp_path_factory.mktemp("step"))
    program = Program(model=run.model, config=run.config)
    pack = jax.tree.map(jnp.asarray, make_pack(run.recipe("train"), 0))
    return program, new_state(program).parameters, pack


@pytest.fixture(scope="module")
def seen(step):
    """The model as stored, the context, and the residual stream before each layer."""
    program, parameters, pack = step
    model = jax.jit(program.seen)(parameters)
    return model, *jax.jit(streams_of, static_argnums=1)(model, program, pack)


def streams_of(model, program, pack):
    """The context, and the residual stream before each layer."""
    _, _, streams = model.hidden(pack.batch, program.layout, taps=[0])
    embedded = model.embedding.get_value()[pack.tokens]
    return Context.of(pack.batch, model.config, program.layout), [embedded, *streams]


def every_place(pack) -> Queries:
    B, Z = pack.tokens.shape
    tiles, places = jnp.meshgrid(jnp.arange(B), jnp.arange(Z), indexing="ij")
    return Queries(tiles.ravel(), places.ravel())


def reached(gradient) -> set[str]:
    return {name for name, values in gradient.items() if np.any(np.asarray(values))}


def test_the_indexer_learns_from_its_own_loss_and_nothing_else_does(step):
    program, parameters, pack = step

    def own_loss(parameters):
        model = program.seen(parameters)
        context, inputs = streams_of(model, program, pack)
        return indexer_loss(model, inputs, context, every_place(pack), program.model.indexer).loss

    def language_loss(parameters):
        model = program.seen(parameters)
        hidden, _, _ = model.hidden(pack.batch, program.layout)
        return token_losses(model, hidden, pack.targets, pack.weights)[0]

    indexers = {name for name in parameters if ".indexer." in name}
    biases = {name for name in parameters if name.endswith(".router.bias")}
    assert reached(jax.jit(jax.grad(own_loss))(parameters)) == indexers
    everything_else = parameters.keys() - indexers - biases
    assert reached(jax.jit(jax.grad(language_loss))(parameters)) == everything_else


@jax.jit
def chosen_and_scored(layer, x, context, queries):
    """The blocks that the model chooses at each place, and our scores there."""
    normed = layer.input_norm(x)
    keys = layer.attention.packed_keys(normed, context)
    chosen_BQKC = layer.attention.indexer(normed, keys.index_k, context)
    return queries.of(chosen_BQKC), index_scores(layer.attention, normed, context, queries)


def test_index_scores_choose_what_the_model_chooses(step, seen):
    pack, (model, context, inputs) = step[2], seen
    queries = every_place(pack)
    results = chosen_and_scored(model.layers[0], inputs[0], context, queries)
    chosen_nKC, scores_nKP = map(np.asarray, results)
    newest = np.maximum(np.asarray(queries.of(pack.positions)), 0) // 16
    far = np.flatnonzero(newest >= 2)  # more than top_k = 2 blocks: the newest and one other
    assert len(far) > 20
    for n in far:
        best = int(np.argmax(scores_nKP[n, 0, : newest[n]]))
        assert set(chosen_nKC[n, 0].tolist()) == {best, int(newest[n])}


def test_an_indexer_catches_no_more_than_it_may_choose(step, seen):
    program, _, pack = step
    model, context, inputs = seen

    def loss(top_k):
        choice = replace(program.model.indexer, top_k=top_k)
        return indexer_loss(model, inputs, context, every_place(pack), choice)

    nothing, one = loss(1), loss(2)
    assert nothing.caught == 0.0 < nothing.looked
    assert 0.0 < one.caught < one.looked


def test_block_mass_is_a_share_of_the_visible_blocks(step, seen):
    pack, (model, context, inputs) = step[2], seen
    queries = every_place(pack)
    layer = model.layers[0]
    mass = jax.jit(block_mass)(layer.attention, layer.input_norm(inputs[0]), context, queries)
    mass, positions = np.asarray(mass)[:, 0], np.asarray(queries.of(pack.positions))
    real = positions >= 0
    assert_close(mass[real].sum(-1), np.ones(real.sum(), np.float32), "f32")
    assert not mass[~real].any()
    later = np.arange(mass.shape[1]) > positions[:, None] // 16
    assert not mass[later].any()
    assert (mass[real & (positions >= 32)][:, :2] > 0).all()


@jax.jit
def choices(layer, x, context):
    """The experts that the router chooses for every token of the whole pack, in a tile's shape."""
    attended, _ = layer.attention(layer.input_norm(x), None, 0, context)
    normed = layer.post_attention_norm(x + attended)
    experts, _ = layer.mlp.router(normed.reshape(-1, normed.shape[-1]))
    return experts.reshape(*x.shape[:2], -1)


def test_loads_count_the_choices_of_the_router(step, seen):
    pack, (model, context, inputs) = step[2], seen
    loads = jax.jit(expert_loads)(model, inputs, context)
    tiles = pack.tokens.shape[0] // SHARE
    experts = choices(model.layers[1], inputs[1], context)[:tiles].reshape(-1, 2)
    real = np.asarray(pack.positions[:tiles]).ravel() >= 0
    counts = np.bincount(np.asarray(experts)[real].ravel(), minlength=4)
    assert loads.keys() == {1}
    assert_close(loads[1], (counts / counts.mean()).astype(np.float32), "f32")


def test_a_busy_expert_becomes_less_attractive():
    bias = jnp.array([0.0, 0.5, -0.5, 0.25])
    moved = balanced_bias(bias, jnp.array([2.0, 0.5, 1.0, 0.0]), 0.125)
    assert moved.tolist() == [-0.125, 0.625, -0.5, 0.375]


def test_with_every_block_attention_is_dense(step):
    program, _, _ = step
    dense = Program(model=program.model, config=program.config, every_block=True)
    assert dense.new_model().config.indexer.top_k == 128 // 16
    assert dense.structure.names == program.structure.names


def test_weight_decay_leaves_vectors_alone(step):
    program, parameters, _ = step
    optimizer = program.optimizer
    state = optimizer.init(parameters)
    state = jax.tree.map(lambda x: x + 1 if x.dtype == jnp.int32 else x, state)  # after warm-up
    nothing = jax.tree.map(jnp.zeros_like, parameters)
    updates, _ = optimizer.update(nothing, state, parameters)
    matrices = {name for name, values in parameters.items() if values.ndim >= 2}
    assert reached(updates) == matrices
