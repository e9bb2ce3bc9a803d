"""Offline generation over the fake device: what comes in, and what its outputs say."""

import asyncio
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

from configs.serving import ServingConfig
from minimax_jax.chat import ChatTemplate
from serving import LLM, SamplingParams
from serving.engine import BatchingEngine
from serving.engine_api import EngineError
from serving.offline.prompts import flags_of
from tests.chat.folders import TINY
from tests.serving.engines import EOS, INFO, alone
from tests.serving.fake_engine_device import EngineDevice
from tests.serving.grammars import tokenizer


@contextmanager
def offline(*, with_tokenizer=True, scripts=None, info=INFO, step_s=0.0, **config):
    limits = {"block_size": 16, "max_model_len": 512, "max_num_seqs": 8}
    device = EngineDevice(64, step_s=step_s)
    device.scripts |= {name: [*tokenizer().encode(t), EOS] for name, t in (scripts or {}).items()}
    given = tokenizer() if with_tokenizer else None
    options = limits | {"max_num_batched_tokens": 128, "num_scheduler_steps": 1} | config
    engine = BatchingEngine(info, ServingConfig(**options), device, tokenizer=given)
    device.attach(engine._steps.scheduler)
    template = ChatTemplate.load(TINY) if with_tokenizer else None
    before = set(threading.enumerate()) - {engine._thread._thread}
    with LLM.over(engine, tokenizer=given, template=template) as llm:
        yield llm, device
    assert set(threading.enumerate()) <= before, "a thread is left"


def test_outputs_come_in_the_order_of_the_prompts_and_say_what_was_asked():
    params = SamplingParams(max_tokens=6, seed=0)
    prompts = [[1, 2, 3], "hello", {"prompt_token_ids": [4, 5]}, {"prompt": "ab"}]
    with offline() as (llm, _):
        outputs = llm.generate(prompts, params)
        for output, prompt in zip(outputs, prompts, strict=True):
            text = prompt if isinstance(prompt, str) else None
            text = prompt.get("prompt") if isinstance(prompt, dict) else text
            assert output.prompt == text and output.finished
            (only,) = output.outputs
            assert only.token_ids == alone(output.prompt_token_ids, max_tokens=6)
            assert only.text == tokenizer().decode(only.token_ids)
            assert (only.finish_reason, only.stop_reason, only.logprobs) == ("length", None, None)


@pytest.mark.parametrize("prompt", ["hello", [1, 2, 3], {"prompt": "hello"}])
def test_one_prompt_needs_no_list(prompt):
    with offline() as (llm, _):
        assert len(llm.generate(prompt, SamplingParams(max_tokens=2))) == 1


def test_each_prompt_may_have_its_own_options():
    with offline() as (llm, _):
        params = [SamplingParams(max_tokens=k, seed=k) for k in (1, 3)]
        outputs = llm.generate([[1], [2]], params)
        assert [len(one.outputs[0].token_ids) for one in outputs] == [1, 3]
        with pytest.raises(ValueError, match="2 sampling_params do not go with 1 prompts"):
            llm.generate([[1]], params)


def test_without_options_the_models_own_count():
    with offline(info=replace(INFO, default_sampling={"temperature": 0.5})) as (llm, device):
        llm.generate([[1]])
        assert device.plans[0].ranks[0].admissions[0].sampling.temperature == 0.5


def test_several_continuations_have_their_index_and_log_probabilities_their_tokens():
    with offline() as (llm, _):
        params = SamplingParams(n=2, max_tokens=3, seed=7, logprobs=2, prompt_logprobs=1)
        (output,) = llm.generate([[1, 2, 3]], params)
        assert [one.index for one in output.outputs] == [0, 1]
        for one in output.outputs:
            assert one.cumulative_logprob == -(3 + 4 + 5) / 8
            for place, entry in enumerate(one.logprobs):
                first = next(iter(entry))
                assert first == one.token_ids[place] and len(entry) == 2
                assert entry[first].logprob == -(3 + place) / 8 and entry[first].rank == 1
                assert entry[first].decoded_token == tokenizer().decode([first])
        assert output.prompt_logprobs[0] is None
        assert [next(iter(one)) for one in output.prompt_logprobs[1:]] == [2, 3]


@pytest.mark.parametrize(
    ("options", "text", "reason"),
    [
        ({}, "one two three", None),
        ({"stop": ("wo",)}, "one t", "wo"),
        ({"stop": ("wo",), "include_stop_str_in_output": True}, "one two", "wo"),
        ({"stop": ("e", "three")}, "on", "e"),
        ({"stop": ("o",), "min_tokens": 4}, None, "o"),
        ({"include_stop_str_in_output": True}, "one two three[e~[", None),
    ],
)
def test_the_text_ends_where_it_should(options, text, reason):
    with offline(scripts={"llm-0": "one two three"}) as (llm, _):
        params = SamplingParams(max_tokens=50, seed=0, **options)
        (only,) = llm.generate([[1]], params)[0].outputs
        assert (only.finish_reason, only.stop_reason) == ("stop", reason)
        assert text is None or only.text == text


def test_a_stop_token_is_not_in_the_text():
    ids = tokenizer().encode("one two x")
    with offline(scripts={"llm-0": "one two x"}) as (llm, _):
        params = SamplingParams(max_tokens=50, stop_token_ids=(ids[-1],))
        (only,) = llm.generate([[1]], params)[0].outputs
        assert (only.token_ids, only.stop_reason) == (ids, ids[-1])
        assert only.text == tokenizer().decode(ids[:-1])


def test_a_chat_is_rendered_by_the_template():
    with offline() as (llm, _):
        messages = [{"role": "user", "content": "Hi"}]
        one = llm.chat(messages, SamplingParams(max_tokens=2))
        two = llm.chat([messages, messages], SamplingParams(max_tokens=2))
        assert len(one) == 1 and len(two) == 2
        assert "Hi" in one[0].prompt
        assert one[0].prompt_token_ids == two[0].prompt_token_ids


def test_more_prompts_than_may_wait_are_generated():
    with offline(max_waiting_requests=4) as (llm, _):
        outputs = llm.generate([[i] for i in range(40)], SamplingParams(max_tokens=2, n=2))
        assert all(len(one.outputs) == 2 for one in outputs)


@pytest.mark.parametrize(
    ("prompts", "sentence"),
    [
        ([[1], []], "empty prompt"),
        ([[1], [999]], "token 999, not in 0..511"),
        ([3.5], "neither text nor ids"),
        ([{"text": "x"}], "it takes one of prompt and prompt_token_ids"),
        ([[1], [1] * 600], "the prompt has 600 tokens"),
    ],
)
def test_nothing_runs_when_one_prompt_cannot(prompts, sentence):
    with offline() as (llm, device):
        with pytest.raises(ValueError, match=sentence):
            llm.generate(prompts, SamplingParams(max_tokens=2))
        assert not device.plans


def test_without_a_tokenizer_ids_are_prompts_and_texts_are_not():
    with offline(with_tokenizer=False) as (llm, _):
        assert llm.generate([[1]], SamplingParams(max_tokens=2))[0].outputs[0].text is None
        with pytest.raises(ValueError, match="no tokenizer"):
            llm.generate(["x"])
        with pytest.raises(ValueError, match="no chat template"):
            llm.chat([{"role": "user", "content": "x"}])


def test_a_failing_engine_is_an_error_and_ends_well():
    with offline() as (llm, device):
        device.fault = RuntimeError("the card fell off")
        with pytest.raises(EngineError, match="the card fell off"):
            llm.generate([[1], [2]], SamplingParams(max_tokens=2))


def test_a_cache_salt_keeps_prefixes_apart_and_a_reset_empties_the_cache():
    prompt, params = list(range(40)), SamplingParams(max_tokens=2)
    with offline() as (llm, _):
        salted = {"prompt_token_ids": prompt, "cache_salt": "a"}
        cached = [llm.generate([one], params)[0].num_cached_tokens for one in (prompt, salted)]
        cached.append(llm.generate([prompt], params)[0].num_cached_tokens)
        llm.reset_prefix_cache()
        cached.append(llm.generate([prompt], params)[0].num_cached_tokens)
        assert cached == [0, 0, 32, 0]


def test_an_interrupted_wait_frees_what_ran():
    with offline(step_s=0.01) as (llm, _):
        run = llm._loop.run
        llm._loop.run = lambda work: run(asyncio.wait_for(work, 0.1))
        with pytest.raises(TimeoutError):
            llm.generate([[1]] * 4, SamplingParams(max_tokens=400))
        llm._loop.run = run
        llm.generate([[2]], SamplingParams(max_tokens=1))
        assert llm.engine.statistics.finished["abort"] == 4


def test_options_are_the_commands_flags():
    options = {"max_model_len": 64, "enable_prefix_caching": False, "revision": None}
    assert flags_of(options) == ["--max-model-len", "64", "--no-enable-prefix-caching"]
    assert flags_of({"speculative_config": {"method": "dspark"}}) == [
        "--speculative-config",
        '{"method": "dspark"}',
    ]
