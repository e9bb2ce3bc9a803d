"""Other weights and several adapters through the same programs; broken logits end one row only."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from minimax_jax.lora import LowRank
from serving.device import ModelDevice
from serving.device.adapters import Adapters
from tests.model.models import random_loaded, random_model, small, tokens
from tests.serving.devices import Driver, assert_right, config_of, output

CONFIG = small(2, num_tokens=501)
LOADED = random_loaded(CONFIG)
POISON = 499  # its embedding is NaN in `poisoned`


def low_rank(seed: int, rank: int, scale: float) -> LowRank:
    a, b = jax.random.split(jax.random.key(seed))
    width = CONFIG.hidden_size
    out = CONFIG.attention.num_heads * CONFIG.attention.head_dim
    return LowRank(
        a=jax.random.normal(a, (rank, width)), b=jax.random.normal(b, (out, rank)), scale=scale
    )


def adapter(seed: int, rank: int, layer: str, scale: float):
    return {"layers": {layer: {"attention": {"q_proj": low_rank(seed, rank, scale)}}}}


ADAPTERS = {"one": adapter(1, 4, "0", 0.5), "two": adapter(2, 2, "1", 0.25)}


@pytest.fixture
def device():
    made = ModelDevice(LOADED, config_of(), num_blocks=96)
    yield made
    made.close()


@pytest.fixture(scope="module")
def adapted():
    made = ModelDevice(LOADED, config_of(), num_blocks=96, adapters=ADAPTERS)
    yield made
    made.close()


def test_a_closed_device_has_given_its_memory_back_whoever_keeps_it():
    made = ModelDevice(LOADED, config_of(), num_blocks=8)
    kept = jax.tree.leaves((made._kept._state, made._kept._masks))
    made.close()
    assert all(leaf.is_deleted() for leaf in kept)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(LOADED.model))
    made.close()


def poisoned():
    leaves, tree = jax.tree.flatten(LOADED.model)
    table = LOADED.model.embedding.get_value()
    return jax.tree.unflatten(
        tree, [x.at[POISON].set(jnp.nan) if x is table else x for x in leaves]
    )


def test_f188_nan_logits_end_their_own_sequence_and_no_other_ever(device):
    device.update(params=poisoned())
    driver = Driver(device, LOADED, num_blocks=14, enable_prefix_caching=False)
    bad = driver.ask("bad", [*tokens(30), POISON, *tokens(10)], max_tokens=20)
    good = driver.ask("good", 60, max_tokens=20)
    driver.run()
    assert bad.finish_reason == "error" and output(bad) == []
    assert sum(bool(result.broken) for result in driver.results) == 1
    after = driver.ask("after", 150, max_tokens=20)  # in the blocks that hold NaN keys
    driver.run()
    assert_right(LOADED, good)
    assert_right(LOADED, after)


def test_other_weights_of_the_same_shapes_are_used_from_the_next_step_on(device):
    """F168, F167: every weight is another one."""
    driver = Driver(device, LOADED)
    driver.ask("old", 40, max_tokens=5)
    driver.run()
    programs, other = device.num_programs, random_loaded(CONFIG, seed=3)
    device.update(params=other.model)
    driver.scheduler.set_weight_version(1)
    new = driver.ask("new", 40, max_tokens=10)
    driver.run()
    assert_right(other, new)
    assert device.num_programs == programs


def test_weights_that_do_not_fit_are_refused_and_nothing_is_changed(device):
    wider = random_model(replace(CONFIG, vocab_size=1024))
    with pytest.raises(ValueError, match="cannot take the place of|not those of the model"):
        device.update(params=wider)
    with pytest.raises(ValueError, match="has a part for layers.0.attention.q_proj"):
        device.update(params=random_model(CONFIG, seed=4), adapters=ADAPTERS)
    driver = Driver(device, LOADED)
    driver.ask("r", 20, max_tokens=5)
    [request] = driver.run()
    assert_right(LOADED, request)


@pytest.mark.slow
def test_rows_of_one_step_have_different_adapters(adapted):
    driver = Driver(adapted, LOADED)
    prompt = tokens(70, seed=5)
    asked = {
        name: driver.ask(str(name), prompt, max_tokens=12, more={"adapter": name})
        for name in (None, "one", "two")
    }
    driver.run()
    for name, request in asked.items():
        base = replace(LOADED, adapter=None if name is None else ADAPTERS[name])
        assert_right(base, request)
    assert len({tuple(output(one)) for one in asked.values()}) == 3


def test_an_adapter_of_the_same_form_takes_the_place_of_another(adapted):
    """F77, F170: reloaded under its name."""
    new = adapter(7, 4, "0", 1.0)
    adapted.update(adapters={"one": new})
    driver = Driver(adapted, LOADED)
    driver.ask("r", 70, max_tokens=12, more={"adapter": "one", "adapter_version": 1})
    [request] = driver.run()
    assert_right(replace(LOADED, adapter=new), request)
    adapted.update(adapters={"one": ADAPTERS["one"]})
    with pytest.raises(ValueError, match=r"adapter 'one' has shapes \(8, 64\) and .* do not hold"):
        adapted.update(adapters={"one": adapter(7, 8, "0", 1.0)})


def test_a_matrix_that_experts_share_is_one_for_each_in_the_common_form():
    shared = LowRank(a=jnp.ones((1, 2, 8)), b=jnp.arange(48.0).reshape(4, 6, 2), scale=0.5)
    own = LowRank(a=jnp.ones((4, 3, 8)), b=jnp.ones((4, 6, 3)), scale=1.0)
    found = Adapters({"shared": {"w1": shared}, "own": {"w1": own}}, None, jnp.asarray)
    pair = found["shared"]["w1"]
    assert pair.a.shape == (4, 3, 8) and pair.b.shape == (4, 6, 3)
    assert (pair.a[:, :2] == 1).all() and not pair.a[:, 2:].any()
    assert (pair.b[..., :2] == 0.5 * shared.b).all()


def test_an_adapter_of_the_model_and_named_ones_exclude_each_other():
    with pytest.raises(ValueError, match="has an adapter of its own"):
        own = replace(LOADED, adapter=ADAPTERS["one"])
        ModelDevice(own, config_of(), num_blocks=8, adapters=ADAPTERS)
