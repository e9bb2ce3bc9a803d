"""The speculative config: vLLM's JSON, what is refused, and what it comes to for a drafter."""

import json

import pytest

from configs.speculative import SpeculativeConfig

RELEASED = {
    "method": "dspark",
    "num_speculative_tokens": 7,
    "attention_backend": "FLASHINFER_TS",
    "draft_sample_method": "probabilistic",
    "kv_cache_dtype": "fp8",
}


def test_the_config_of_the_released_launch_is_read():
    config = SpeculativeConfig.parse(json.dumps(RELEASED))
    assert config == SpeculativeConfig(**RELEASED)
    assert config.verified(7) == 7
    line = config.described(7)
    assert "7 of 7 drafts" in line and "FLASHINFER_TS: dispatch chooses" in line


def test_without_keys_all_drafts_are_verified_from_an_fp8_cache():
    config = SpeculativeConfig.parse("{}")
    assert config == SpeculativeConfig()
    assert (config.verified(5), config.cache_format("bf16")) == (5, "fp8")
    assert "dispatch" not in config.described(5)


@pytest.mark.parametrize(
    ("name", "format"),
    [("auto", "f32"), ("bfloat16", "bf16"), ("fp8_e4m3", "fp8"), ("nvfp4", "nvfp4")],
)
def test_a_cache_format_has_vllms_names_too(name, format):
    assert SpeculativeConfig(kv_cache_dtype=name).cache_format("f32") == format


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is not JSON"),
        ("[]", "no JSON object"),
        ('{"num_spec": 3, "methd": "dspark"}', "has no num_spec, methd; it has method,"),
        ('{"method": "eagle3"}', "method='eagle3' is not one of dspark"),
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens=0 is not a whole number"),
        ('{"num_speculative_tokens": true}', "num_speculative_tokens=True is not a whole"),
        ('{"num_speculative_tokens": 2.0}', "num_speculative_tokens=2.0 is not a whole"),
        ('{"draft_sample_method": "gumbel"}', "'gumbel' is not one of probabilistic, greedy"),
        ('{"kv_cache_dtype": "int8"}', "kv_cache_dtype='int8' is not one of auto, f32"),
        ('{"kv_cache_dtype": ["fp8"]}', "kv_cache_dtype="),
        ('{"attention_backend": 3}', "attention_backend=3 is not a name"),
    ],
)
def test_what_cannot_be_is_one_sentence(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        SpeculativeConfig.parse(text)


def test_more_drafts_than_the_drafter_proposes_are_refused():
    with pytest.raises(ValueError, match="num_speculative_tokens=8 is more than the drafter's 7"):
        SpeculativeConfig(num_speculative_tokens=8).verified(7)
