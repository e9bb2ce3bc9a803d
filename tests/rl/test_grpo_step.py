"""The update: its gradient is that of the whole batch however it is packed, and reaches what is
trained alone.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.rl import GRPOConfig
from rl.experience import Experience, pack_experience
from rl.grpo_metrics import combined
from rl.grpo_step import accumulate, apply, pack_loss
from rl.local_rollout import LocalRollout
from rl.optimizer import TrainState
from rl.packing import PackShape
from tests.rl.grpo_toy import (
    CONFIG,
    SHAPE,
    experiences,
    on_device,
    program,
    toy_loaded,
    toy_policy,
    toy_request,
)

LOADED = toy_loaded()


@pytest.fixture(scope="module")
def parameters():
    return toy_policy(LOADED)[0]


@pytest.fixture(scope="module")
def rollouts():
    return LocalRollout(loaded=LOADED, wave=64)(toy_policy(LOADED)[1], toy_request())


def gradient(parameters, examples, tiles=16, config=CONFIG):
    """The batch's gradient and its metrics."""
    shape = PackShape(tiles=tiles, tile_tokens=16, blocks=8)
    total = jax.tree.map(jnp.zeros_like, parameters)
    sums = []
    for pack in pack_experience(examples, shape)[0]:
        args = LOADED.model, parameters, on_device(pack), program(LOADED, config)
        total, found = accumulate(total, *args)
        sums.append(found)
    return total, combined(jax.device_get(sums)), len(sums)


def test_neither_packing_nor_accumulation_changes_the_gradient(parameters, rollouts):
    whole, metrics, one = gradient(parameters, experiences(rollouts), tiles=48)
    parts, others, many = gradient(parameters, experiences(rollouts)[::-1], tiles=8)
    assert one == 1 and many >= 3
    for name, x in whole.items():
        scale = np.abs(x).max()
        np.testing.assert_allclose(x, parts[name], atol=2e-6 + 2e-5 * scale, err_msg=name)
    for name, value in metrics.items():
        assert others[name] == pytest.approx(value, rel=1e-4, abs=2e-6), name


def test_the_loss_is_the_token_mean_of_what_was_sampled(parameters, rollouts):
    """On policy its value is -mean(A lp) over sampled tokens."""
    examples = experiences(rollouts)
    _, metrics, _ = gradient(parameters, examples)
    products = [one.advantage * one.logprobs.sum() for one in examples]
    count = sum(len(one.logprobs) for one in examples)
    assert metrics["loss"] == pytest.approx(-sum(products) / count, rel=1e-4)
    assert metrics["tokens"] == count
    assert metrics["rollout_corr/k3_kl"] < 1e-9 and metrics["rollout_corr/not_finite"] == 0
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1, rel=1e-4)


def test_the_gradient_is_that_of_finite_differences(parameters, rollouts):
    pack = on_device(pack_experience(experiences(rollouts)[:3], SHAPE)[0][0])
    # without the weight, which is a constant of the gradient but not of a difference
    compiled = program(LOADED, replace(CONFIG, correction="none"))
    loss = jax.jit(lambda p: pack_loss(p, LOADED.model, pack, compiled)[0])
    slope = jax.grad(loss)(parameters)
    for name in ("layers.1.mlp.experts.w2.b", "layers.0.attention.q_proj.a"):
        direction = jax.random.normal(jax.random.key(1), parameters[name].shape)
        step = 1e-2 / float(jnp.linalg.norm(direction))
        ends = [{**parameters, name: parameters[name] + s * step * direction} for s in (1, -1)]
        found = (float(loss(ends[0])) - float(loss(ends[1]))) / (2 * step)
        wanted = float(jnp.vdot(slope[name], direction))
        assert found == pytest.approx(wanted, rel=0.05, abs=1e-3), name


def test_every_trained_array_but_those_behind_a_zero_has_a_gradient(parameters, rollouts):
    total, _, _ = gradient(parameters, experiences(rollouts))
    assert all(np.abs(x).max() > 0 and np.isfinite(x).all() for x in total.values())


def test_a_batch_of_zero_advantages_has_no_gradient(parameters, rollouts):
    examples = [replace(one, advantage=0.0) for one in experiences(rollouts)]
    total, metrics, _ = gradient(parameters, examples)
    assert metrics["loss"] == 0 and all(not np.abs(x).any() for x in total.values())


def test_minus_infinity_of_the_rollout_is_counted_and_harmless(parameters, rollouts):
    """F158."""
    examples = experiences(rollouts)
    logprobs = examples[0].logprobs.copy()
    logprobs[0] = -np.inf
    total, metrics, _ = gradient(parameters, [replace(examples[0], logprobs=logprobs)])
    assert metrics["rollout_corr/not_finite"] == 1
    assert all(np.isfinite(x).all() for x in total.values())


def test_the_divergence_is_from_the_model_without_its_adapter(parameters, rollouts):
    config = replace(CONFIG, divergence_weight=0.5, divergence="k3")
    fresh = {name: x * (not name.endswith(".b")) for name, x in parameters.items()}
    # both choose their experts: replayed ones would be those of the adapter
    examples = experiences(rollouts, choices=False)
    _, near, _ = gradient(fresh, examples, config=config)
    _, far, _ = gradient(parameters, examples, config=config)
    assert near["actor/kl_loss"] == pytest.approx(0, abs=1e-9) and far["actor/kl_loss"] > 1e-3
    assert far["loss"] == pytest.approx(far["actor/pg_loss"] + 0.5 * far["actor/kl_loss"], rel=1e-4)


def test_an_update_makes_good_answers_likelier(parameters, rollouts):
    examples = [replace(one, advantage=1.0) for one in experiences(rollouts)[:2]]
    compiled = program(LOADED, replace(CONFIG, warmup_steps=0))
    state = TrainState.new(parameters, compiled.optimizer)
    total, before, _ = gradient(parameters, examples)
    state, norm = apply(state, total, compiled)
    _, after, _ = gradient(state.parameters, examples)
    assert after["rollout_corr/kl"] < before["rollout_corr/kl"] - 1e-3 and norm > 0


def test_an_answer_that_no_pack_holds_is_refused():
    long = Experience(
        tokens=np.zeros(130, int), logprobs=np.zeros(5), advantage=1.0, weight=1.0, choices=None
    )
    with pytest.raises(ValueError, match="has 130 tokens, more than the 128 of a pack"):
        pack_experience([long], SHAPE)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"samples": 1}, "samples=1: a group of one has no advantage"),
        ({"loss": "ppo_clip"}, "correction=token_tis on top of loss=ppo_clip would correct twice"),
        ({"wave": 8}, "wave=8 is less than samples=16"),
        ({"overlong_tokens": 99}, "overlong_tokens=99 is more than max_tokens=64"),
        ({"rollout_cache": "int8"}, "rollout_cache='int8' is not one of f32, bf16, fp8, nvfp4"),
        (
            {"rollout_cache": "fp8", "replay_cache": True},
            "rollout_cache=fp8 is not what replay_cache=true could replay",
        ),
        ({"temperature": 0.0}, "temperature=0.0 is not positive"),
        ({"correction_low": 3.0}, "correction_low=3.0 is not less than correction_high=2.0"),
    ],
)
def test_an_impossible_config_is_one_sentence(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        GRPOConfig(**changes)
