"""The options of one request: what is refused, and the seeds of its sequences."""

import pytest

from configs.sampling import MAX_SEED
from serving.scheduling.sampling_params import SamplingParams, child_seed


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"n": 0}, "n=0 is not in 1..128"),
        ({"seed": -1}, "seed=-1 is not in"),
        ({"temperature": -0.1}, "temperature=-0.1 is not a number from 0 on"),
        ({"temperature": float("nan")}, "temperature=nan is not"),
        ({"top_p": 0.0}, "top_p=0.0 is not in (0, 1]"),
        ({"top_k": -2}, "top_k=-2 is neither"),
        ({"min_p": 1.5}, "min_p=1.5 is not in [0, 1]"),
        ({"presence_penalty": 2.5}, "presence_penalty=2.5 is not in [-2, 2]"),
        ({"frequency_penalty": -3.0}, "frequency_penalty=-3.0 is not in [-2, 2]"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 is not above 0"),
        ({"logit_bias": {5: 101.0}}, "logit_bias of token 5 is 101.0"),
        ({"max_tokens": -1}, "max_tokens=-1 is not at least 1"),
        ({"max_tokens": 0}, "0 goes with prompt_logprobs only"),
        ({"min_tokens": 17}, "min_tokens=17 is more than max_tokens=16"),
        ({"logprobs": -1}, "logprobs=-1 is negative"),
        ({"prompt_logprobs": -1}, "prompt_logprobs=-1 is negative"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0 is neither"),
        ({"stop": "END"}, "stop='END' is one text"),
        ({"stop": ("",)}, "stop=('',) has an empty text"),
        ({"bad_words": ("a", "")}, "bad_words=('a', '') has an empty text"),
    ],
)
def test_a_bad_option_is_refused_with_its_value(options, sentence):
    with pytest.raises(ValueError) as error:
        SamplingParams(**options)
    assert sentence in str(error.value)


def test_f135_no_tokens_are_asked_for_only_to_score_the_prompt():
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    assert SamplingParams(max_tokens=1).max_tokens == 1
    assert SamplingParams(max_tokens=None, min_tokens=10**6).max_tokens is None


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {300: 1.0}},
        {"allowed_token_ids": (1, 300)},
        {"stop_token_ids": (-1,)},
    ],
)
def test_a_token_outside_the_vocabulary_is_named(options):
    params = SamplingParams(**options)
    with pytest.raises(ValueError, match=f"{next(iter(options))} names token .* not in 0..299"):
        params.check_vocabulary(300)


def test_penalties_are_noticed_and_their_neutral_values_are_none():
    assert not SamplingParams().has_penalties
    assert SamplingParams(repetition_penalty=1.1).has_penalties
    assert SamplingParams(presence_penalty=-0.5).has_penalties
    assert SamplingParams(temperature=0).is_greedy


def test_f115_the_sequences_of_a_request_have_seeds_of_their_own_that_repeat():
    seeds = [child_seed(7, index) for index in range(128)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 128
    assert seeds == [child_seed(7, index) for index in range(128)]
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
    assert child_seed(8, 1) != child_seed(7, 1)
