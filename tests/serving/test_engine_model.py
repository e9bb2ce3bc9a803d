"""A hundred mixed requests sent together over a real model: each gets what it gets alone."""

import asyncio
import json
import random

import jsonschema
import pytest

from serving.device import ModelDevice
from serving.grammar.source import Thought
from serving.scheduling.request import Asked
from serving.scheduling.sampling_params import SamplingParams, StructuredOutput
from tests.model.models import random_loaded, small, tokens
from tests.serving.devices import config_of
from tests.serving.engines import collect, run
from tests.serving.grammars import Grammars, GrammarVocabulary
from tests.serving.model_engines import (
    assert_obeys,
    assert_prompt_is_scored,
    assert_whole_is_right,
    engine_over,
)

LOADED = random_loaded(small(2, num_tokens=501))  # chooses two blocks of 16
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]} | {
    "additionalProperties": False
}
JSON = StructuredOutput(kind="json", text=json.dumps(SCHEMA), from_first_token=True)
KINDS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9},
    "stop": {"temperature": 0.9, "stop": ("e", "th")},
    "two": {"temperature": 0.9, "n": 2},
    "logprobs": {"temperature": 0.9, "logprobs": 3},
    "prompt": {"temperature": 0.0, "prompt_logprobs": 1},
    "penalties": {"temperature": 0.9, "presence_penalty": 1.0, "logit_bias": {3: 5.0}},
    "json": {"temperature": 0.0, "structured_outputs": JSON},
    "abort": {"temperature": 0.9, "max_tokens": 200},
}


@pytest.fixture(scope="module")
def device():
    made = ModelDevice(LOADED, config_of(max_num_seqs=8), num_blocks=64)
    yield made
    made.close()


def asked(name: str, kind: str, dice: random.Random) -> Asked:
    prompt = tokens(dice.choice([1, 7, 16, 33, 90, 200]), seed=dice.randrange(4))
    options = {"max_tokens": dice.randrange(1, 40), "seed": dice.randrange(5)} | KINDS[kind]
    assert LOADED.tokenizer is not None
    return Asked(
        request_id=name,
        prompt=[int(token) for token in prompt],
        sampling=SamplingParams(**options),
        eos_token_ids=LOADED.tokenizer.stop_ids,
    )


@pytest.mark.slow
def test_a_hundred_mixed_requests_give_what_each_gives_alone(device):
    dice = random.Random(1)
    kinds = [dice.choice(list(KINDS)) for _ in range(100)]
    requests = [asked(f"{i} {kind}", kind, dice) for i, kind in enumerate(kinds)]

    async def test():
        async with engine_over(device, LOADED) as engine:
            streams = [engine.submit(one) for one in requests]
            tasks = [asyncio.create_task(collect(one)) for one in streams]
            for one, kind in zip(requests, kinds, strict=True):
                if kind == "abort":
                    await asyncio.sleep(0.2 * dice.random())
                    engine.abort(one.request_id)
            wholes = await asyncio.gather(*tasks)
            return wholes, engine.statistics

    wholes, statistics = run(test)
    assert statistics.preemptions > 0 and statistics.prefix_hits > 0
    for one, kind, sequences in zip(requests, kinds, wholes, strict=True):
        assert len(sequences) == one.sampling.n
        for index, whole in enumerate(sequences):
            _check(one, kind, index, whole)


def _check(one: Asked, kind: str, index: int, whole) -> None:
    if kind == "json":
        vocabulary = GrammarVocabulary(LOADED.tokenizer, LOADED.config.num_tokens)
        stops = LOADED.tokenizer.stop_ids
        matcher = Grammars(vocabulary).matcher(JSON, Thought.OVER, stops)
        assert_obeys(LOADED, one, whole.tokens, matcher)
        if whole.reason == "stop":
            text = LOADED.tokenizer.decode(whole.tokens[:-1])
            jsonschema.validate(json.loads(text), SCHEMA)
        return
    assert_whole_is_right(LOADED, one, index, whole)
    if kind == "prompt":
        assert_prompt_is_scored(LOADED, one, whole.parts[0])
    if kind == "stop" and whole.end.matched_stop is not None:
        text = LOADED.tokenizer.decode(whole.tokens)
        assert isinstance(whole.end.matched_stop, int) or whole.end.matched_stop in text
