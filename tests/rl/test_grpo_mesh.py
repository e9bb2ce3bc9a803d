"""GRPO on meshes: update and rollout of one device, to rounding; checkpoints of any mesh."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.parallel import ParallelConfig
from configs.rl import GRPOConfig
from minimax_jax.checkpoint import parameters_of
from minimax_jax.loaded import LoadedModel
from rl.experience import pack_experience
from rl.grpo_step import Program, accumulate, apply
from rl.local_rollout import LocalRollout
from rl.optimizer import TrainState
from rl.placement import Places
from rl.policy import Policy, published
from rl.rollouts import check_rollouts
from rl.run_checkpoints import RunCheckpoints, abstract_like
from sharding import SERVE, make_mesh, named_sharding, with_parallel
from tests.numerics import relative_error
from tests.rl.grpo_toy import (
    CONFIG,
    SHAPE,
    experiences,
    on_device,
    toy_loaded,
    toy_policy,
    toy_request,
)
from tests.rl.test_rollout import compared

pytestmark = [pytest.mark.devices(8), pytest.mark.slow]  # 40 s
MESH = "dp2,tp2,ep"  # dp2, tp2 and tp2,ep, measured by hand, are as close
BOUND = 1e-5  # relative L2 of gradient and parameters in float32: 2e-6 was the most


def on_mesh(text: str) -> LoadedModel:
    """The toy, laid out as `load` would."""
    parallel = ParallelConfig.parse(text)
    loaded, mesh, rules = toy_loaded(), make_mesh(parallel), with_parallel(SERVE, parallel)
    for one in parameters_of(loaded.model).values():
        value = one.get_value()
        one.set_value(jax.device_put(value, named_sharding(mesh, one.axes, rules, value.shape)))
    loaded.model.rules = rules
    return replace(loaded, mesh=mesh)


@pytest.mark.parametrize(
    "changes", [{"rollout": "engine", "replay": False}, {"replay_cache": True}]
)
def test_what_needs_one_device_is_refused(changes):
    with pytest.raises(ValueError, match="parallel=tp2 needs rollout=local and replay_cache=false"):
        GRPOConfig(parallel="tp2", **changes)


@pytest.fixture(scope="module")
def packs():
    """Rollouts of one device with their record of experts, in two packs."""
    loaded = toy_loaded()
    rollouts = LocalRollout(loaded=loaded, wave=64)(toy_policy(loaded)[1], toy_request())
    return pack_experience(experiences(rollouts), SHAPE)[0]


def updated(loaded: LoadedModel, packs, text: str = "tp1") -> tuple[dict, TrainState, float]:
    """Two updates along one gradient, from the same parameters: gradient, state, norm."""
    parameters, _ = toy_policy(toy_loaded())
    places = Places.of(loaded.model, parameters, ParallelConfig.parse(text))
    how = {"layout": loaded.layout, "config": CONFIG, "places": places}
    program = Program(model=loaded.config, **how)
    state = places.placed(TrainState.new(parameters, program.optimizer), loaded.mesh)
    gradient = jax.tree.map(jnp.zeros_like, state.parameters)
    with loaded.on_mesh():
        for pack in packs:
            pack = on_device(pack)
            gradient, _ = accumulate(gradient, loaded.model, state.parameters, pack, program)
        found = jax.device_get(gradient)
        after, norm = apply(state, gradient, program)
        # the first step of the warm-up changes nothing
        again = places.placed(jax.tree.map(jnp.asarray, found), loaded.mesh)
        after, _ = apply(after, again, program)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim), "an update moved an array"
    return found, after, float(norm)


@pytest.fixture(scope="module")
def alone(packs):
    return updated(toy_loaded(), packs)


def shares(state: TrainState) -> set[int]:
    """Into how many parts arrays of parameters and moments are cut."""
    leaves = jax.tree.leaves((state.parameters, state.optimizer))
    return {x.size // max(1, x.addressable_shards[0].data.size) for x in leaves}


@pytest.fixture(scope="module")
def meshed(packs):
    return updated(on_mesh(MESH), packs, MESH)


def test_an_update_on_a_mesh_is_that_of_one_device(alone, meshed):
    gradient, state, norm = meshed
    assert shares(state) == {1, 2, 4}
    for name, wanted in alone[0].items():
        assert relative_error(gradient[name], wanted) <= BOUND, name
    assert norm == pytest.approx(alone[2], rel=BOUND)
    for ours, wanted in zip(*map(jax.tree.leaves, (state, alone[1])), strict=True):
        assert relative_error(np.asarray(ours), np.asarray(wanted)) <= BOUND
    start = toy_policy(toy_loaded())[0]
    assert all(relative_error(np.asarray(state.parameters[n]), start[n]) > 1e-3 for n in start)


def test_a_checkpoint_of_one_mesh_is_restored_on_another(meshed, tmp_path):
    first, other = meshed[1], on_mesh("tp2")
    places = Places.of(other.model, first.parameters, ParallelConfig.parse("tp2"))
    empty = jax.tree.map(jnp.zeros_like, vars(first))
    with RunCheckpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(1, vars(first), {})
        wanted = places.placed(empty, other.mesh)
        found, _ = checkpoints.restore(abstract_like(wanted))
    for x, y, z in zip(*map(jax.tree.leaves, (vars(first), found, wanted)), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
        assert y.sharding == z.sharding


@pytest.mark.parametrize("mesh", [MESH, "dp2,tp2,dcp2,split"])
def test_a_rollout_on_a_mesh_is_what_one_device_computes_of_it(mesh):
    """Its log-probabilities and experts, of prompts and samples that data ranks share."""
    loaded, parameters = on_mesh(mesh), toy_policy(toy_loaded())[0]
    model, adapter = published(loaded.model, parameters, CONFIG)
    policy = Policy(model=model, adapter=adapter, version=3)
    found = LocalRollout(loaded=loaded, wave=64)(policy, toy_request())
    check_rollouts(found, toy_request(), 3, loaded.config)
    assert len({one.tokens for one in found}) == len(found)
    told = compared(parameters, found)
    assert told["rollout_corr/logprob_abs_diff"] <= 2e-6
    assert told["rollout_corr/logprob_abs_diff_max"] <= 1e-4
    assert told["routing/overlap_mean"] == 1 and told["routing/flip_frac"] == 0
