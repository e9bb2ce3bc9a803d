"""Speculation on several devices: weights by their shardings, the same tokens."""

import jax
import numpy as np
import pytest

from configs.parallel import ParallelConfig
from minimax_jax.checkpoint import load_model, save_model
from minimax_jax.sampling import SamplingParams
from minimax_jax.speculative.checkpoint import load_drafter, save_drafter
from minimax_jax.speculative.steps import SpeculationOptions
from sharding.mesh import make_mesh
from tests.drafter.models import drafted, random_drafter
from tests.model.models import random_model, small, tokens
from tests.speculation.runs import Run, proposing

pytestmark = [pytest.mark.devices(8), pytest.mark.slow]
PROMPTS = [tokens(length, seed=length) for length in (17, 40)]
PARAMS = [SamplingParams(temperature=t, seed=3) for t in (0.0, 1.0)]
OPTIONS = SpeculationOptions(rows=16)


def steps(run: Run, config):
    """Tokens of three steps; in the first, two drafts go on as plain decoding does."""
    cache, state, first = run.started(16, OPTIONS)
    greedy = run.plain(3)
    drafts = np.zeros((2, config.drafter.draft_block), np.int32)
    drafts[:, :2] = greedy.tokens[1:3].T
    state, found = proposing(state, drafts), [first.tokens[None]]
    for _ in range(3):
        cache, state, done = run.step(cache, state, 7, OPTIONS)
        found.append(done.generated.tokens)
    return np.concatenate(found).T.tolist()


@pytest.mark.parametrize("parallel", [ParallelConfig(tp=2), ParallelConfig(dp=2, tp=2)], ids=str)
def test_a_mesh_commits_the_tokens_of_one_device(parallel, tmp_path):
    config = drafted(small(2, num_tokens=501))
    save_model(random_model(config), tmp_path / "model")
    save_drafter(random_drafter(config), config, tmp_path / "model")
    found = []
    for mesh in (make_mesh(ParallelConfig()), make_mesh(parallel)):
        with jax.set_mesh(mesh):
            model, _ = load_model(tmp_path / "model", dtype="float32", mesh=mesh)
            drafter, _ = load_drafter(tmp_path / "model", config, dtype="float32", mesh=mesh)
            assert len(drafter.fc.weight.get_value().sharding.device_set) == mesh.size
            found.append(steps(Run(PROMPTS, PARAMS, config, model, drafter), config))
    assert found[0] == found[1]
