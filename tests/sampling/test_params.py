"""What cannot be asked for is refused with a sentence that has the value in it."""

import pytest

from minimax_jax.sampling import SamplingParams


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 is not above 0"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty=nan is not above 0"),
        ({"presence_penalty": 2.5}, r"presence_penalty=2.5 is not in \[-2, 2\]"),
        ({"frequency_penalty": -2.1}, r"frequency_penalty=-2.1 is not in \[-2, 2\]"),
        ({"logit_bias": {5: 101.0}}, "logit_bias of token 5 is 101.0, not in"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias of token 5 is nan"),
        ({"allowed_token_ids": ()}, "allowed_token_ids is empty"),
        ({"bad_words": ((),)}, "has a word of no tokens"),
        ({"min_tokens": -1}, "min_tokens=-1 is negative"),
        ({"seed": 2**63}, "seed=9223372036854775808 is not in"),
    ],
)
def test_an_impossible_option_is_refused(params, sentence):
    with pytest.raises(ValueError, match=sentence):
        SamplingParams(**params)


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {300: 1.0}},
        {"allowed_token_ids": (1, 300)},
        {"stop_token_ids": (300,)},
        {"bad_words": ((1, 300),)},
    ],
)
def test_ids_beyond_the_tokens_are_refused(params):
    [name] = params
    with pytest.raises(ValueError, match=f"{name} names token 300, not in 0..299"):
        SamplingParams(**params).check_vocabulary(300)
    SamplingParams(**params).check_vocabulary(301)


def test_top_k_of_minus_one_is_off():
    assert SamplingParams(top_k=-1).top_k == -1
