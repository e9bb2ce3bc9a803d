"""Adapters: a hook in every linear, equal to the merged weight, in all three ways through the
model.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

import minimax_jax
from minimax_jax import lora
from minimax_jax.batch import pack
from minimax_jax.cache import CacheFormats, pool_layout
from minimax_jax.lora import LowRank
from minimax_jax.model import Model
from tests.model.models import random_loaded, random_model, small, tokens
from tests.numerics import relative_error

RANK = 4


def low_rank(weight: jax.Array, key: jax.Array, zero: bool = False) -> LowRank:
    *experts, out_dim, in_dim = weight.shape
    a, b = jax.random.split(key)
    return LowRank(
        a=0.1 * jax.random.normal(a, (*experts, RANK, in_dim)),
        b=(0.0 if zero else 0.3) * jax.random.normal(b, (*experts, out_dim, RANK)),
        scale=0.5,
    )


def linears(model: Model) -> dict[tuple[str, ...], jax.Array]:
    """Path -> weight of every linear of the layers, and of the head."""
    found = {("head",): model.head.weight.get_value()}
    for i, layer in enumerate(model.layers):
        for path, leaf in jax.tree_util.tree_leaves_with_path(layer):
            names = tuple(key.name for key in path if hasattr(key, "name"))[:-2]
            if leaf.ndim >= 2 and "router" not in names:
                found["layers", str(i), *names] = leaf
    return found


def nested(flat: dict) -> dict:
    tree: dict = {}
    for path, value in flat.items():
        place = tree
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = value
    return tree


def adapter_for(model: Model, **options) -> dict[tuple[str, ...], LowRank]:
    weights = linears(model)
    keys = jax.random.split(jax.random.key(7), len(weights))
    return {p: low_rank(w, k, **options) for (p, w), k in zip(weights.items(), keys, strict=True)}


def merged(model: Model, adapter: dict[tuple[str, ...], LowRank]) -> Model:
    """The model with each adapter added into its weight."""
    model = jax.tree.map(lambda leaf: leaf, model)
    for path, pair in adapter.items():
        module = model
        for name in path:
            module = module[int(name)] if name.isdigit() else getattr(module, name)
        weight = module.weight.get_value()
        update = jnp.einsum("...FR,...RD->...FD", pair.b, pair.a, precision="highest")
        module.weight.set_value(weight + pair.scale * update)
    return model


def test_every_linear_has_a_hook():
    model = random_model(small(2))
    names = {path[-1] for path in linears(model)}
    projections = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert names == projections | {"w1", "w2", "w3", "head"}
    adapter = nested(adapter_for(model, zero=True))
    layout = pool_layout(model.config, CacheFormats(kv="f32", index="f32"))
    batch, _ = pack(np.array(tokens(80)), np.zeros(80, int), layout.block_size)

    def loss(adapter):
        hidden, _, _ = model.hidden(batch, layout, None, adapter)
        return jnp.sum(model.logits(hidden, adapter)[..., :100] ** 2)

    for path, gradient in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(adapter)):
        names = [key.key for key in path if hasattr(key, "key")]
        if path[-1].name == "b" and "indexer" not in names:  # selection is hard: no gradient
            assert jnp.abs(gradient).max() > 1e-4, names


def test_an_adapter_of_zeros_changes_nothing():
    base = random_loaded(small(2, num_tokens=501))
    adapter = nested(adapter_for(base.model, zero=True))
    before, after = (
        np.asarray(minimax_jax.logits(one, tokens(60)))
        for one in (base, replace(base, adapter=adapter))
    )
    np.testing.assert_allclose(after, before, atol=1e-5)


def test_an_adapter_equals_the_merged_weights():
    base = random_loaded(small(2, num_tokens=501))
    adapter = adapter_for(base.model)
    hooked = minimax_jax.logits(replace(base, adapter=nested(adapter)), tokens(80))
    expected = minimax_jax.logits(replace(base, model=merged(base.model, adapter)), tokens(80))
    np.testing.assert_allclose(hooked, expected, atol=1e-4)


def test_generate_uses_the_adapter():
    """A head adapter that favours token 7 makes every greedy token 7."""
    base = replace(random_loaded(small(2, num_tokens=501)), tokenizer=None, template=None)
    dim, rows = base.config.hidden_size, base.config.vocab_size
    norm = base.model.norm
    norm.weight.set_value(-jnp.ones(dim))  # the normed state is zero ...
    greedy = minimax_jax.generate(base, [1, 2, 3], max_tokens=3, temperature=0.0)[0]
    assert greedy.token_ids == (0, 0, 0)  # ... so all logits tie, and the lower id wins
    norm.weight.set_value(jnp.zeros(dim))
    push = LowRank(a=jnp.ones((1, dim)), b=jnp.zeros((rows, 1)).at[7].set(1e3), scale=1.0)
    both_ways = LowRank(a=push.a, b=-push.b, scale=1.0)
    outputs = [
        minimax_jax.generate(
            replace(base, adapter={"head": one}), [1, 2, 3], max_tokens=1, temperature=0.0
        )[0].token_ids[0]
        for one in (push, both_ways)
    ]
    assert (outputs[0] == 7) != (outputs[1] == 7)


def test_beside_bfloat16_no_product_is_float32():
    """Of both passes; and the values are the float32 ones to bfloat16's rounding."""
    pair = low_rank(jnp.zeros((48, 32)), jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (5, 32), jnp.bfloat16)

    def gradients(x, pair):
        return jax.grad(lambda x, pair: jnp.sum(lora.low_rank(x, pair) ** 2), (0, 1))(x, pair)

    equations = jax.make_jaxpr(gradients)(x, pair).jaxpr.eqns
    products = [one for one in equations if one.primitive.name == "dot_general"]
    assert len(products) == 6
    assert {operand.aval.dtype for one in products for operand in one.invars} == {x.dtype}
    whole = jax.tree.leaves(gradients(x.astype(jnp.float32), pair))
    for one, expected in zip(jax.tree.leaves(gradients(x, pair)), whole, strict=True):
        assert relative_error(one.astype(jnp.float32), expected) < 2e-2


def test_experts_with_adapters_of_their_own_agree_beside_bfloat16():
    pair = low_rank(jnp.zeros((3, 48, 32)), jax.random.key(0))
    shared = replace(pair, a=pair.a[:1])
    x, sizes = jax.random.normal(jax.random.key(1), (9, 32)), jnp.asarray([4, 0, 5])
    for one in (pair, shared):
        expected = lora.grouped_low_rank(x, one, sizes)
        found = lora.grouped_low_rank(x.astype(jnp.bfloat16), one, sizes)
        assert found.dtype == jnp.bfloat16
        assert relative_error(found.astype(jnp.float32), expected) < 2e-2
