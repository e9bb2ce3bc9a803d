"""Rollouts by an engine: each policy handed over once, and what an engine cannot give is said."""

from dataclasses import replace

import numpy as np
import pytest

from configs.rl import GRPOConfig
from rl.engine_rollout import EngineRollout, Sampled
from rl.rollouts import check_rollouts
from tests.rl.grpo_toy import toy_loaded, toy_policy, toy_request


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


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"record": True}, "no record of experts: set replay=false"),
        ({"temperature": 0.5}, "temperature=0.5: an engine's log-probabilities are those"),
    ],
)
def test_what_an_engine_cannot_give_is_said(changes, sentence):
    """F165: by the config already, before anything runs."""
    request = toy_request(**{"record": False} | changes)
    with pytest.raises(ValueError, match=sentence):
        EngineRollout(Echo())(toy_policy(toy_loaded())[1], request)
    assert GRPOConfig(rollout="engine", replay=False).rollout == "engine"
    for one in ({"replay": True}, {"replay": False, "temperature": 0.5}):
        with pytest.raises(ValueError, match="rollout=engine needs temperature=1, .*replay=false"):
            GRPOConfig(rollout="engine", **one)
