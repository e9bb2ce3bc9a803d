"""A model on several devices: the compiler partitions by the weights' sharding, the answers stay
the same.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

import minimax_jax
from configs.parallel import ParallelConfig
from minimax_jax.checkpoint import parameters_of, save_model
from sharding.mesh import make_mesh
from sharding.rules import SERVE, with_parallel
from tests.model.models import random_model, small, tokens

pytestmark = pytest.mark.devices(8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "random"
    config = small(2)  # two shards of 64 are whole groups of MXFP8
    config = replace(config, moe=replace(config.moe, expert_dim=64, shared_dim=64))
    save_model(random_model(config), path, format="m3.1")
    return path


# tp4 and dep4 run in the fast set too, on a random model: `tests/sharding/test_model_on_meshes.py`.
@pytest.mark.parametrize(
    "text",
    ["tp2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("dp2,tp2", "tp2,ep"))],
)
def test_a_mesh_gives_the_logits_and_tokens_of_one_device(folder, text):
    parallel = ParallelConfig.parse(text)
    options = {"dtype": "float32", "kv": "f32", "index": "f32"}
    alone = minimax_jax.load(folder, **options)
    rules = with_parallel(SERVE, parallel)
    spread = minimax_jax.load(folder, mesh=make_mesh(parallel), rules=rules, **options)
    stored = parameters_of(spread.model)["layers.1.mlp.experts.w1.weight"].get_value()
    experts = jax.tree.leaves(stored)[0]
    assert experts.sharding.shard_shape(experts.shape)[0] == experts.shape[0] // parallel.ep
    weight = spread.model.layers[0].attention.q_proj.weight.get_value()
    assert len(weight.codes.sharding.device_set) == parallel.num_devices
    prompt = tokens(70)
    scored = [np.asarray(minimax_jax.logits(one, prompt)) for one in (alone, spread)]
    np.testing.assert_allclose(scored[1], scored[0], atol=1e-4)
    greedy = [
        minimax_jax.generate(one, prompt, max_tokens=8, temperature=0.0)[0].token_ids
        for one in (alone, spread)
    ]
    assert greedy[0] == greedy[1]
