"""Rollouts by the local function: what they record is what the trainer computes of them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minimax_jax.cache import Cache
from rl import grpo_step, local_rollout, lockstep
from rl.experience import pack_experience
from rl.grpo_metrics import combined
from rl.grpo_step import accumulate
from rl.local_rollout import LocalRollout
from rl.rollouts import check_rollouts
from rl.wave_plan import WavePlan
from tests.rl.grpo_toy import (
    CONFIG,
    PROMPTS,
    SHAPE,
    experiences,
    on_device,
    program,
    toy_loaded,
    toy_policy,
    toy_request,
)

LOADED = toy_loaded()
LOCAL = LocalRollout(loaded=LOADED, wave=64)


@pytest.fixture(scope="module")
def policy():
    return toy_policy(LOADED)


@pytest.fixture(scope="module")
def rollouts(policy):
    return LOCAL(policy[1], toy_request())


def compared(parameters, rollouts, config=CONFIG):
    """What the trainer measures of rollouts: `rl.grpo_metrics`."""
    parts = []
    for pack in pack_experience(experiences(rollouts), SHAPE)[0]:
        zero = jax.tree.map(jnp.zeros_like, parameters)
        args = LOADED.model, parameters, on_device(pack), program(LOADED, config)
        parts.append(jax.device_get(accumulate(zero, *args)[1]))
    return combined(parts)


def differences(parameters, rollouts, config=CONFIG):
    """Mean and largest |difference| of log-probabilities."""
    found = compared(parameters, rollouts, config)
    return tuple(found[f"rollout_corr/logprob_abs_diff{name}"] for name in ("", "_max"))


def test_answers_are_whole_and_in_order(policy, rollouts):
    check_rollouts(rollouts, toy_request(), 3, LOADED.config)
    for number, rollout in enumerate(rollouts):
        assert rollout.prompt == tuple(PROMPTS[number // 3])
        stops = [token in toy_request().stop_ids for token in rollout.tokens]
        assert not any(stops[:-1])
        assert rollout.finish == ("stop" if stops[-1] else "length")
        assert stops[-1] or len(rollout.tokens) == 24
    assert {rollout.finish for rollout in rollouts} == {"stop", "length"}
    assert len({rollout.tokens for rollout in rollouts}) == len(rollouts)


def test_the_trainer_computes_the_rollouts_logprobs(policy, rollouts):
    mean, largest = differences(policy[0], rollouts)
    assert mean <= 2e-6 and largest <= 1e-4, (mean, largest)


def test_they_agree_at_another_temperature(policy):
    """F160: both sides divide the logits by it."""
    config = replace(CONFIG, temperature=0.6)
    found = LOCAL(policy[1], toy_request(temperature=0.6))
    assert differences(policy[0], found, config)[1] <= 1e-4
    assert differences(policy[0], found)[1] > 0.1


def test_the_record_is_what_the_trainer_would_choose(policy, rollouts):
    """F163: in prompts too, whose whole blocks and records the samples share."""
    found = compared(policy[0], rollouts)
    assert found["routing/overlap_mean"] == 1 and found["routing/flip_frac"] == 0
    changed = [replace(one, choices=(one.choices + 1) % 4) for one in rollouts]
    assert compared(policy[0], changed)["routing/overlap_mean"] < 0.9


def test_the_rollouts_pages_are_the_trainers_keys_and_values(policy):
    """Replayed, nothing is rounded anew, and the gradient still reaches what makes the keys."""
    recorded = LOCAL(policy[1], toy_request(record_cache=True))
    for one in recorded:
        blocks = -(-(len(one.prompt) + len(one.tokens)) // 16)
        assert one.pages is not None and len(one.pages) == blocks
    mean, largest = differences(policy[0], recorded)
    assert mean <= 2e-6 and largest <= 1e-4, (mean, largest)
    zeros = [replace(one, pages=np.zeros_like(one.pages)) for one in recorded]
    assert differences(policy[0], zeros)[0] > 0.01
    pack = on_device(pack_experience(experiences(recorded), SHAPE)[0][0])
    zero = jax.tree.map(jnp.zeros_like, policy[0])
    gradient, _ = accumulate(zero, LOADED.model, policy[0], pack, program(LOADED))
    reached = [name for name, x in gradient.items() if ".k_proj." in name and jnp.any(x != 0)]
    assert len(reached) == 4, reached  # two matrices in each of two layers


def test_a_sample_depends_on_its_seed_alone(policy, rollouts):
    """Neither on the wave nor on the samples beside it."""
    request = toy_request()
    alone = replace(request, prompts=PROMPTS[2:], seeds=request.seeds[2:, 1:2])
    (found,) = LocalRollout(loaded=LOADED, wave=1)(policy[1], alone)
    assert found.tokens == rollouts[7].tokens
    np.testing.assert_array_equal(found.choices, rollouts[7].choices)
    np.testing.assert_allclose(found.logprobs, rollouts[7].logprobs, atol=1e-5)


def test_small_waves_give_the_same(policy, rollouts):
    found = LocalRollout(loaded=LOADED, wave=3)(policy[1], toy_request())
    assert [one.tokens for one in found] == [one.tokens for one in rollouts]


def early(rollouts) -> tuple[int, ...]:
    """Five stop ids, as many as before, that end five of nine answers within three tokens."""
    stops = dict.fromkeys(one.tokens[2] for one in rollouts[:5])
    return tuple([*stops, *toy_request().stop_ids][:5])


def test_rows_that_have_ended_are_left_behind(policy, rollouts, monkeypatch):
    request = toy_request(stop_ids=early(rollouts))
    whole = LOCAL(policy[1], request)
    monkeypatch.setattr(local_rollout, "LEAST_ROWS", 1)
    sizes, taken = [], lockstep.taken
    monkeypatch.setattr(
        lockstep, "taken", lambda rows, tree: sizes.append(len(rows)) or taken(rows, tree)
    )
    found = LOCAL(policy[1], request)
    assert sizes and max(sizes) < 12
    assert [one.tokens for one in found] == [one.tokens for one in whole]
    assert [one.finish for one in found] == [one.finish for one in whole]
    for one, other in zip(found, whole, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        np.testing.assert_array_equal(one.choices, other.choices)


def test_logprobs_come_from_the_decode_program(policy, rollouts, monkeypatch):
    """With the packed program poisoned nothing changes."""

    def poisoned(*args, **kwargs):
        raise AssertionError("the packed program ran")

    for name in ("accumulate", "token_statistics", "frozen_head_statistics", "pack_loss"):
        monkeypatch.setattr(grpo_step, name, poisoned)
    again = LOCAL(policy[1], toy_request())
    for one, other in zip(again, rollouts, strict=True):
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


def test_the_adapter_is_used(policy, rollouts):
    plain = LOCAL(replace(policy[1], adapter=None), toy_request())
    assert [one.tokens for one in plain] != [one.tokens for one in rollouts]


def test_new_weights_need_no_new_program(policy):
    lockstep.decode_with_logprobs.clear_cache()
    for version in (3, 4):
        LOCAL(replace(policy[1], version=version), toy_request())
    assert lockstep.decode_with_logprobs._cache_size() == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"choices": None}, "answer 4 of the rollout has no record of experts, which replay=true"),
        ({"choices": np.zeros((3, 1, 2), np.uint8)}, r"experts \[3, 1, 2\], not \[\d+, 1, 2\]"),
        ({"version": 2}, "answer 4 of the rollout is of weights 2, not 3"),
        ({"logprobs": np.zeros(0, np.float32)}, "has 0 log-probabilities for"),
        ({"prompt": (1, 2)}, "answer 4 of the rollout is to another prompt than was asked"),
    ],
)
def test_a_rollout_that_is_not_of_its_request_is_refused(rollouts, changes, sentence):
    """F162, F165, F170."""
    changed = list(rollouts)
    changed[4] = replace(changed[4], **changes)
    with pytest.raises(ValueError, match=sentence):
        check_rollouts(changed, toy_request(), 3, LOADED.config)
    with pytest.raises(ValueError, match="answer 0 of the rollout has no pages of its cache"):
        check_rollouts(rollouts, toy_request(record_cache=True), 3, LOADED.config)
    with pytest.raises(ValueError, match="gave 8 answers, not 9"):
        check_rollouts(rollouts[1:], toy_request(), 3, LOADED.config)


def test_the_plan_shares_whole_blocks_and_copies_the_begun_one():
    plan = WavePlan.of([3, 16, 40, 0], 2, 20, 16, least=2)
    assert plan.prompt_table.shape == (4, 4)
    shared, own = plan.sample_table[4:6, :2], plan.sample_table[4:6, 2:5]
    np.testing.assert_array_equal(shared, [plan.prompt_table[2, :2]] * 2)
    assert len(np.unique(own)) == own.size and own.min() >= 16
    # 40 tokens begin a third block, 16 end theirs
    assert plan.copy_from[4] == plan.prompt_table[2, 2] and plan.copy_to[4] == own[0, 0]
    np.testing.assert_array_equal(plan.copy_from[2:4], plan.copy_to[2:4])
    assert plan.sample_table.max() < plan.num_rows


def test_data_ranks_count_their_rows_from_zero():
    """Two ranks with two prompts and four samples each have the plan that one has of its own."""
    lengths, how = [3, 16, 40, 7], {"samples": 2, "max_tokens": 20, "row_tokens": 16, "least": 2}
    both = WavePlan.of(lengths, **how, data_ranks=2)
    for rank, own in enumerate((lengths[:2], [*lengths[2:]])):
        alone = WavePlan.of([*own, max(lengths)], **how)  # as wide
        rows = slice(4 * rank, 4 * rank + 4)
        same = (both.sample_table[rows] >= 0) == (alone.sample_table[:4] >= 0)
        assert same.all() and both.sample_table[rows].max() < both.num_rows
        owned = both.sample_table[rows, :][both.sample_table[rows] >= 2 * 4]
        assert len(np.unique(owned)) == len(owned)
    np.testing.assert_array_equal(both.prompt_table[:2], both.prompt_table[2:])


def test_a_copied_block_takes_everything_along():
    """F70: of every layer keys, values, their scales and index keys, and the experts' record."""
    empty = Cache.empty(LOADED.layout, 4).recording(LOADED.config)
    filled = replace(
        empty,
        pool=jax.random.randint(jax.random.key(1), empty.pool.shape, 0, 256).astype(jnp.uint8),
        choices=jax.random.randint(jax.random.key(2), empty.choices.shape, 0, 4).astype(jnp.uint8),
    )
    pool, choices = np.array(filled.pool), np.array(filled.choices)
    pool[:, 3], choices[3] = pool[:, 1], choices[1]
    found = local_rollout.copy_rows(filled, jnp.array([1, 0]), jnp.array([3, 0]))
    np.testing.assert_array_equal(found.pool, pool)
    np.testing.assert_array_equal(found.choices, choices)
