"""The drafter's config: the released file, what it may leave out, and what is refused."""

from dataclasses import replace

import pytest

from configs.model import ModelConfig
from configs.parts import DrafterConfig
from configs.presets import m3_1_flash
from tests.configs.drafters import released_drafter


def read(root: dict, target: ModelConfig | None = None, **target_keys) -> DrafterConfig:
    """The drafter that a file gives beside the M3.1 target."""
    config = (target or m3_1_flash()).to_hf() | target_keys
    drafter = ModelConfig.from_hf(config, root).drafter
    assert drafter is not None
    return drafter


def test_the_released_file_gives_the_preset():
    assert read(released_drafter()) == m3_1_flash().drafter


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"projections": "bf16"},
        {"confidence_head": False},
        {"window": 128, "norm_eps": 1e-5, "target_layers": (2, 1)},
    ],
)
def test_a_drafter_survives_writing_and_reading(changes):
    preset = m3_1_flash()
    config = replace(preset, drafter=replace(preset.drafter, **changes))
    assert ModelConfig.from_hf(config.to_hf(), config.drafter_to_hf()) == config


def test_a_model_without_a_drafter_has_no_file_to_write():
    with pytest.raises(ValueError, match="the model has no drafter"):
        replace(m3_1_flash(), drafter=None).drafter_to_hf()


def test_what_the_file_leaves_out_is_as_in_the_target():
    target = m3_1_flash()
    target = replace(
        target,
        norm_eps=1e-5,
        attention=replace(target.attention, rope_theta=1e4, rotary_dim=32),
        mlp=replace(target.mlp, limit=5.0),
    )
    root = released_drafter()
    for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"):
        del root["text_config"][key]
    del root["text_config"]["rotary_dim"], root["text_config"]["rope_theta"]
    drafter = read(root, target)
    assert drafter.attention == target.attention
    assert (drafter.norm_eps, drafter.mlp.limit) == (1e-5, 5.0)


def test_epsilon_and_rotary_embedding_are_the_drafters_own():
    root = released_drafter(rms_norm_eps=1e-5, rope_theta=1e4, partial_rotary_factor=0.25)
    del root["text_config"]["rotary_dim"]
    drafter = read(root)
    assert drafter.norm_eps == 1e-5
    assert (drafter.attention.rope_theta, drafter.attention.rotary_dim) == (1e4, 32)


def test_the_ffn_width_is_dsparks_own():
    assert read(released_drafter(dense_intermediate_size=3072)).mlp.dense_dim == 12288


def test_the_format_is_the_drafters_own():
    root = released_drafter()
    del root["quantization_config"]
    assert read(root).projections == "bf16"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dspark_markov_head_type": "gated"}, "dspark_markov_head_type='gated'"),
        ({"dspark_markov_head_type": "rnn"}, "dspark_markov_head_type='rnn'"),
        ({"dspark_markov_rank": 0}, "dspark_markov_rank is 0 in one place and 256 in another"),
        ({"confidence_head_with_markov": False}, "confidence_head_with_markov=False"),
        ({"sample_from_anchor": False}, "sample_from_anchor=False"),
        ({"dspark_hybrid_context_fusion": True}, "dspark_hybrid_context_fusion=True"),
        ({"dspark_use_dense_ffn": False}, "dspark_use_dense_ffn=False"),
        ({"moe_layer_freq": [0, 0, 1, 0, 0]}, "its MLPs are dense"),
        ({"sparse_attention_config": {"sparse_block_size": 128}}, "sparse_attention_config"),
        ({"layer_types": ["full_attention"] * 5}, "are not 5 of 'sliding_attention'"),
        ({"sliding_window": None}, "window=None is not a number"),
        ({"use_gemma_norm": False}, "use_gemma_norm=False"),
        ({"is_causal": True}, "is_causal=True"),
        ({"draft_vocab_size": 32000}, "draft_vocab_size=32000"),
        ({"vocab_size": 151936}, "vocab_size=151936 of dspark/config.json but the target has"),
        ({"hidden_size": 4096}, "hidden_size=4096 of dspark/config.json but the target has 6144"),
        ({"num_key_value_heads": 8}, "8 key/value heads of 128 do not share pages"),
        ({"dspark_block_size": 5}, "dspark_block_size is 5 in one place and 7 in another"),
        ({"dspark_noise_token_id": 300000}, "dspark_noise_token_id is 300000"),
        ({"rope_scaling": {"type": "yarn"}}, "rope type 'yarn'"),
    ],
)
def test_another_drafter_is_refused_with_a_sentence(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(released_drafter(**changes))


def test_a_missing_noise_token_has_no_default():
    root = released_drafter()
    del root["text_config"]["dspark_noise_token_id"], root["dspark_noise_token_id"]
    with pytest.raises(ValueError, match="no dspark_noise_token_id"):
        read(root)


@pytest.mark.parametrize(
    ("root_changes", "sentence"),
    [
        ({"architectures": ["Qwen3DSparkModel"]}, "is of 'Qwen3DSparkModel'"),
        ({"dflash_config": {"num_target_layers": 48}}, "for a target of 48 layers"),
        ({"dflash_config": {"causal": True}}, "causal=True"),
        ({"dflash_config": {"target_layer_ids": [4, 18]}}, r"\[4, 18\] in another"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method 'fp8'"),
    ],
)
def test_what_stands_beside_the_text_config_counts(root_changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(released_drafter() | root_changes)


def test_the_targets_own_file_has_to_agree():
    with pytest.raises(ValueError, match="dspark_block_size is 7 in one place and 5 in another"):
        read(released_drafter(), dspark_block_size=5)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"target_layers": (3, 60)}, "taps layer 60 of a model of 60"),
        ({"target_layers": (3, 3)}, "not distinct"),
        ({"target_layers": (-1, 3)}, "not distinct layers from 0"),
        ({"target_layers": ()}, "names no target layers"),
        ({"markov_rank": 0}, "markov_rank=0 is not at least 1"),
        ({"noise_token": 200064}, "noise token 200064 is not in 0..200063"),
    ],
)
def test_impossible_values_are_refused(changes, sentence):
    preset = m3_1_flash()
    with pytest.raises(ValueError, match=sentence):
        replace(preset, drafter=replace(preset.drafter, **changes))
