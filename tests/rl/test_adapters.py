"""A new adapter: where it is, what it changes, and its files."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from configs.presets import m3_1_flash, tiny
from minimax_jax.lora import LowRank
from minimax_jax.peft import CONFIG, MATRICES, read_adapter
from rl.adapters import adapted_linears, as_adapter, new_adapter
from rl.optimizer import Structure
from rl.peft_files import write_adapter
from rl.policy import initial_parameters, published
from tests.rl.grpo_toy import CONFIG as TOY
from tests.rl.grpo_toy import shaken, toy_loaded
from tests.rl.toy import MODEL

KEY = jax.random.key(0)


def count(config, expert_lora, rank):
    sizes = [
        rank
        * (one.in_dim * np.prod((1, *one.a_experts)) + one.out_dim * np.prod((1, *one.b_experts)))
        for one in adapted_linears(config, expert_lora)
    ]
    return int(sum(sizes))


def test_neither_indexer_nor_router_nor_head_has_one():
    paths = [one.path for one in adapted_linears(tiny(), "per_expert")]
    assert len(paths) == 5 * 4 + 3 + 4 * 6
    assert not any(part in path for path in paths for part in ("indexer", "router", "head"))


def test_the_full_size_needs_shared_matrices():
    """spec/rl 3.1: 6.5 billion numbers of the experts, or a third of them."""
    config = m3_1_flash()
    experts = count(config, "per_expert", 32) - count(config, "none", 32)
    assert experts == 57 * 128 * 32 * 3 * (6144 + 3072)
    shared = count(config, "shared_outer", 32) - count(config, "none", 32)
    assert shared == 57 * 32 * 3 * (128 * 3072 + 6144)


@pytest.mark.parametrize("expert_lora", ["per_expert", "shared_outer", "none"])
def test_the_tree_is_the_models_own(expert_lora):
    parameters = new_adapter(MODEL, expert_lora, 4, KEY)
    tree = as_adapter(parameters, 0.5)
    leaf = tree["layers"]["0"]["attention"]["q_proj"]
    assert isinstance(leaf, LowRank) and leaf.scale == 0.5
    assert leaf.a.shape == (4, 32) and leaf.b.shape == (32, 4) and not leaf.b.any()
    assert np.abs(leaf.a).max() <= 32**-0.5
    experts = tree["layers"]["1"]["mlp"].get("experts")
    assert (experts is None) == (expert_lora == "none")
    if experts is not None:
        outer = 1 if expert_lora == "shared_outer" else 4
        assert experts["w1"].a.shape == (outer, 4, 32) and experts["w2"].b.shape == (outer, 32, 4)
        assert experts["w1"].b.shape == (4, 32, 4) and experts["w2"].a.shape == (4, 4, 32)


def test_a_rank_beyond_every_linear_is_refused():
    with pytest.raises(ValueError, match="rank=64 is more than 32, the largest rank of any linear"):
        new_adapter(MODEL, "per_expert", 64, KEY)


@pytest.mark.parametrize("expert_lora", ["per_expert", "shared_outer"])
def test_files_come_back_bit_for_bit(tmp_path, expert_lora):
    parameters = shaken(new_adapter(MODEL, expert_lora, 4, KEY))
    write_adapter(parameters, MODEL, "base", rank=4, alpha=8.0, folder=tmp_path)
    found = read_adapter(tmp_path, toy_loaded().model)
    wanted = as_adapter(parameters, 2.0)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, np.broadcast_to(other, one.shape))


def test_files_have_pefts_names_and_shapes(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    parameters = shaken(new_adapter(MODEL, "per_expert", 4, KEY))
    write_adapter(parameters, MODEL, "base", rank=4, alpha=8.0, folder=tmp_path)
    found = safetensors.load_file(tmp_path / MATRICES)
    layer = "base_model.model.language_model.model.layers.1"
    expert = found[f"{layer}.block_sparse_moe.experts.3.w2.lora_A.weight"]
    np.testing.assert_array_equal(expert, parameters["layers.1.mlp.experts.w2.a"][3])
    assert found[f"{layer}.self_attn.k_proj.lora_B.weight"].shape == (16, 4)
    described = json.loads((tmp_path / CONFIG).read_text("utf-8"))
    assert described["r"] == 4 and described["lora_alpha"] == 8.0
    assert {"w1", "w2", "w3", "q_proj", "down_proj"} <= set(described["target_modules"])


def test_full_training_leaves_the_indexer_and_the_biases_alone():
    loaded = toy_loaded()
    names = set(initial_parameters(loaded, replace(TOY, trained="full")))
    assert "embedding" in names and "layers.1.mlp.router.weight" in names
    assert not any("indexer" in name or "router.bias" in name for name in names)


def test_every_changed_weight_reaches_the_rollouts_model():
    """F168: 0.01 is added to each, and no array of the model is a copy that stays behind."""
    loaded, config = toy_loaded(), replace(TOY, trained="full")
    parameters = initial_parameters(loaded, config)
    changed = {name: x + 0.01 for name, x in parameters.items()}
    model, _ = published(loaded.model, changed, config)
    before, after = (Structure.of(one).parameters(one) for one in (loaded.model, model))
    assert len(after) == len(jax.tree.leaves(model)) and changed.keys() < after.keys()
    for name, x in after.items():
        np.testing.assert_array_equal(x, changed.get(name, before[name]), err_msg=name)
