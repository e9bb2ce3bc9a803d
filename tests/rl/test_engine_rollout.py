"""Rollouts by an engine: each policy handed over once, and what an engine cannot give is said."""

from dataclasses import replace

import numpy as np
import pytest

import serving
from configs.rl import GRPOConfig
from configs.serving import ServingConfig
from rl.__main__ import POLICY, ServedPolicy
from rl.engine_rollout import EngineRollout, Sampled
from rl.rollouts import check_rollouts
from serving.assembly import engine_info
from serving.device import ModelDevice
from serving.engine import BatchingEngine
from tests.rl.grpo_toy import toy_loaded, toy_policy, toy_request
from tests.rl.test_rollout import compared


class Echo:
    """Answers with the seed."""

    def __init__(self):
        self.published = []

    def publish(self, adapter):
        self.published.append(adapter)

    def answers(self, prompts, seeds, request):
        pairs = zip(prompts, seeds, strict=True)
        return [Sampled(tokens=[s, len(p)], logprobs=[-1.0, -2.0], finish="stop") for p, s in pairs]


def test_answers_lie_by_prompt_and_seed_and_each_policy_is_published_once():
    loaded, engine = toy_loaded(), Echo()
    _, policy = toy_policy(loaded)
    request, rollout = toy_request(record=False), EngineRollout(engine)
    found = rollout(policy, request)
    check_rollouts(found, request, policy.version, loaded.config)
    assert [one.tokens for one in found] == [
        (int(seed), len(prompt))
        for prompt, seeds in zip(request.prompts, request.seeds, strict=True)
        for seed in seeds
    ]
    np.testing.assert_array_equal(found[0].logprobs, np.float32([-1, -2]))
    rollout(policy, request)
    assert engine.published == [policy.adapter]
    rollout(replace(policy, adapter={}), request)
    assert len(engine.published) == 2


def test_what_an_engine_cannot_give_is_said():
    """F165: by the config already, before anything runs; and an engine that records nothing is no
    engine for a replay.
    """
    _, policy = toy_policy(toy_loaded())
    with pytest.raises(ValueError, match=r"temperature=0\.5: an engine's log-probabilities are"):
        EngineRollout(Echo())(policy, toy_request(temperature=0.5))
    for one in ({"replay_cache": True}, {"temperature": 0.5}):
        with pytest.raises(ValueError, match="rollout=engine needs temperature=1, .*_cache=false"):
            GRPOConfig(rollout="engine", **{"replay_cache": False} | one)
    found = EngineRollout(Echo())(policy, toy_request())
    with pytest.raises(ValueError, match="answer 0 of the rollout has no record of experts"):
        check_rollouts(found, toy_request(), policy.version, toy_loaded().config)


@pytest.mark.slow
def test_the_trainer_replays_the_engines_records():
    """15 s. One sequence at a time, so that no near tie of a router depends on who runs beside."""
    loaded = toy_loaded()
    parameters, policy = toy_policy(loaded)
    limits = {"block_size": 16, "max_model_len": 128, "max_num_seqs": 1}
    limits |= {"max_num_batched_tokens": 32, "num_scheduler_steps": 1}
    config = ServingConfig(**limits, enable_return_routed_experts=True)
    device = ModelDevice(loaded, config, 24, adapters={POLICY: policy.adapter})
    engine = BatchingEngine(engine_info(loaded, config), config, device, adapters=[POLICY])
    request = toy_request()
    with ServedPolicy(serving.LLM.over(engine)) as served:
        rollouts = EngineRollout(served)(policy, request)
        assert engine.statistics.prefix_hits > 0
    check_rollouts(rollouts, request, policy.version, loaded.config)
    found = compared(parameters, rollouts)
    assert found["routing/overlap_mean"] == 1 and found["routing/flip_frac"] == 0
    assert found["rollout_corr/logprob_abs_diff_max"] <= 1e-4
    poisoned = [*rollouts[:-1], replace(rollouts[-1], choices=rollouts[-1].choices ^ 1)]
    assert compared(parameters, poisoned)["routing/overlap_mean"] < 1
    device.close()
