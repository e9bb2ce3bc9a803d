"""Rollouts that speculate: the target's law, log-probabilities and records, by any drafter."""

from dataclasses import replace

import numpy as np
import pytest
from flax import nnx

import minimax_jax
from configs.rl import GRPOConfig
from configs.speculative import SpeculativeConfig
from minimax_jax.drafter import Drafter
from minimax_jax.loaded import LoadedModel
from minimax_jax.speculative.calibration import Calibration
from minimax_jax.speculative.setup import Speculation
from minimax_jax.speculative.stats import SpeculationStats
from rl.local_rollout import LocalRollout
from rl.rollouts import check_rollouts
from tests.rl.drafter_toy import DRAFTER
from tests.rl.grpo_toy import CONFIG, toy_loaded, toy_policy, toy_request
from tests.rl.test_rollout import compared

pytestmark = pytest.mark.slow  # 30 s, most of it to compile

GAP = 1e-3  # of two best logits: a row's change by 3e-5 with the rows beside it


def speculating() -> LoadedModel:
    """The toy with a random drafter: both spread over 500 tokens, so that it is sometimes right."""
    loaded = toy_loaded()
    drafter = Drafter(replace(loaded.config, drafter=DRAFTER), nnx.Rngs(1))
    config = SpeculativeConfig(kv_cache_dtype="auto")
    calibration = Calibration.none(7)
    return replace(
        loaded, speculation=Speculation(drafter=drafter, config=config, calibration=calibration)
    )


LOADED = speculating()
LOCAL = LocalRollout(loaded=LOADED, wave=64)


@pytest.fixture(scope="module")
def policy():
    return toy_policy(LOADED)


@pytest.fixture(scope="module")
def rollouts(policy):
    return LOCAL(policy[1], toy_request())


def test_answers_are_whole_and_some_drafts_are_kept(rollouts):
    check_rollouts(rollouts, toy_request(), 3, LOADED.config)
    for one in rollouts:
        stops = [token in toy_request().stop_ids for token in one.tokens]
        assert not any(stops[:-1]) and (stops[-1] or len(one.tokens) == 24)
        assert one.finish == ("stop" if stops[-1] else "length")
        assert one.speculation.committed == len(one.tokens) - 1  # all but the first
    stats = SpeculationStats.total(one.speculation for one in rollouts)
    assert 0 < stats.accepted < stats.drafted


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_trainer_computes_the_same_logprobs_and_experts(policy, rollouts, temperature):
    """F160, F163: those of the target, at the temperature, whoever proposed the token."""
    found = rollouts
    if temperature != 1:
        found = LOCAL(policy[1], toy_request(temperature=temperature))
    told = compared(policy[0], found, replace(CONFIG, temperature=temperature))
    assert told["rollout_corr/logprob_abs_diff"] <= 2e-6
    assert told["rollout_corr/logprob_abs_diff_max"] <= 1e-4
    assert told["routing/overlap_mean"] == 1 and told["routing/flip_frac"] == 0


def test_greedy_answers_are_those_without_drafts(policy):
    """Up to a tie, which is proven: there the two best logits are no further apart than GAP."""
    request = toy_request(temperature=0.0)
    plain = LocalRollout(loaded=replace(LOADED, speculation=None), wave=64)(policy[1], request)
    scored = replace(LOADED, adapter=policy[1].adapter, speculation=None)
    for one, other in zip(LOCAL(policy[1], request), plain, strict=True):
        pairs = zip(one.tokens, other.tokens, strict=False)
        place = next((k for k, (a, b) in enumerate(pairs) if a != b), None)
        if place is None:
            assert one.tokens == other.tokens
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
            continue
        tokens = np.array([*one.prompt, *one.tokens[:place]])
        logits = np.asarray(minimax_jax.logits(scored, tokens))[-1]
        chosen = logits[[one.tokens[place], other.tokens[place]]]
        assert np.all(chosen >= logits.max() - GAP), f"they differ at {place} by no tie"


def test_an_engine_does_not_speculate_for_the_local_rollout():
    with pytest.raises(ValueError, match="rollout_speculative=true is of rollout=local"):
        GRPOConfig(rollout="engine", replay=False, rollout_speculative=True)
