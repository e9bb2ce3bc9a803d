"""Configs: released and rewritten `config.json` files, presets, and refusals in one sentence."""

import copy
from dataclasses import replace

import pytest

from configs.model import ModelConfig
from configs.parts import QuantizationConfig
from configs.presets import PRESETS, m3, m3_1_flash, tiny, tiny_random
from tests.configs.drafters import released_drafter

RELEASED_TEXT = {
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "hidden_size": 6144,
    "num_hidden_layers": 60,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 200064,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-6,
    "use_gemma_norm": True,
    "attention_output_gate": False,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "hidden_act": "swigluoai",
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "intermediate_size": 3072,
    "shared_intermediate_size": 3072,
    "dense_intermediate_size": 12288,
    "n_shared_experts": 1,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "routed_scaling_factor": 2.0,
    "moe_layer_freq": [0] * 3 + [1] * 57,
    "tie_word_embeddings": False,
    "num_mtp_modules": 7,
    "num_nextn_predict_layers": 1,
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_index_dim": 128,
        "sparse_num_index_heads": 4,
        "sparse_topk_blocks": 16,
        "sparse_block_size": 128,
        "sparse_disable_index_value": [0] * 3 + [1] * 57,
        "sparse_score_type": "max",
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_attention_freq": [0] * 3 + [1] * 57,
    },
}
RELEASED = {
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
    "model_type": "minimax_m3_vl",
    "image_token_index": 200025,
    "vision_config": {"hidden_size": 1280, "patch_size": 14},
    "text_config": RELEASED_TEXT,
}
M3_1_QUANTIZATION = {
    "quant_method": "mxfp8",
    "weight_block_size": [1, 32],
    "activation_scheme": "dynamic",
    "group_size": 16,
    "moe_quant_algo": "NVFP4",
    "moe_quant_format": "nvfp4-pack-quantized",
    "kv_cache_quant_algo": "FP8",
    "attention_quant_algo": "FP8",
    "index_k_quant_type": "nvfp4",
}


def released(**changes) -> dict:
    root = copy.deepcopy(RELEASED)
    root["text_config"] |= changes
    return root


def test_the_released_m3_file_gives_the_m3_preset():
    assert replace(ModelConfig.from_hf(RELEASED), vision="") == m3()


def test_the_m3_1_file_with_its_drafter_gives_the_m3_1_preset():
    root = released()
    sparse = root["text_config"]["sparse_attention_config"]
    sparse |= {"sparse_attention_freq": [1] * 60, "sparse_disable_index_value": [1] * 60}
    root["quantization_config"] = M3_1_QUANTIZATION
    assert replace(ModelConfig.from_hf(root, released_drafter()), vision="") == m3_1_flash()


def test_the_mxfp8_file_names_mxfp8_projections_and_experts():
    section = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "ignored_layers": ["lm_head"]}
    quantization = ModelConfig.from_hf(RELEASED | {"quantization_config": section}).quantization
    assert (quantization.projections, quantization.experts) == ("mxfp8", "mxfp8")
    assert quantization.kv_cache is None


def test_attention_and_mlp_lists_are_independent():
    root = released()
    root["text_config"]["sparse_attention_config"]["sparse_attention_freq"] = [1] * 60
    config = ModelConfig.from_hf(root)
    assert all(config.sparse_layers) and config.moe_layers[:4] == (False, False, False, True)


def test_what_transformers_writes_back_is_read():
    text = {
        k: v
        for k, v in RELEASED_TEXT.items()
        if k not in ("sparse_attention_config", "moe_layer_freq", "rope_theta")
    }
    text |= {
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 57,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "partial_rotary_factor": 0.5,
        },
        "index_block_size": 128,
        "index_head_dim": 128,
        "index_n_heads": 4,
        "index_topk_blocks": 16,
        "index_local_blocks": 1,
    }
    assert ModelConfig.from_hf({"model_type": "minimax_m3_vl", "text_config": text}) == m3()


def test_older_files_count_tokens_of_init_and_local():
    root = released()
    sparse = root["text_config"]["sparse_attention_config"]
    sparse |= {"sparse_init_tokens": 100, "sparse_local_tokens": 128}
    indexer = ModelConfig.from_hf(root).indexer
    assert (indexer.init_blocks, indexer.local_blocks) == (1, 2)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_survives_writing_and_reading(name):
    config = replace(PRESETS[name](), drafter=None)
    assert ModelConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize("kv", [None, "bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("index", [None, "bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("weights", [("bf16", "bf16"), ("mxfp8", "nvfp4"), ("mxfp8", "bf16")])
def test_every_mixture_of_formats_survives_writing_and_reading(kv, index, weights):
    if (kv, index) == (None, "nvfp4"):
        return  # a file that names the index alone means M3.1's pages: nvfp4 for both
    formats = QuantizationConfig(
        projections=weights[0], experts=weights[1], kv_cache=kv, index_cache=index
    )
    config = replace(tiny(), quantization=formats)
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_the_vision_part_is_kept_and_written_back():
    config = ModelConfig.from_hf(RELEASED)
    assert config.to_hf()["vision_config"] == RELEASED["vision_config"]
    assert config.to_hf()["image_token_index"] == 200025


def test_padding_rows_of_the_released_vocabulary_are_no_tokens():
    assert ModelConfig.from_hf(RELEASED).num_tokens == 200061


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_attention_heads": 62}, "num_heads=62 is not a multiple of num_kv_heads=4"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok=129 is more than"),
        ({"rotary_dim": 32}, "rotary_dim=32 but head_dim x partial_rotary_factor is 64"),
        ({"moe_layer_freq": [1] * 59}, "moe_layer_freq has 59 entries for 60 layers"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"attention_output_gate": True}, "attention_output_gate"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ({"use_gemma_norm": False}, "use_gemma_norm=False"),
        ({"n_shared_experts": 2}, "n_shared_experts=2"),
        ({"hidden_size": "6144"}, "hidden_size='6144' is not a number"),
        ({"head_dim": None}, "head_dim=None is not a whole number"),
        ({"mlp_layer_types": ["odd"] * 60, "moe_layer_freq": None}, "mlp_layer_types has 'odd'"),
        ({"hidden_size": 0}, "hidden_size=0 is not at least 1"),
        ({"rope_scaling": {"type": "yarn"}}, "rope type 'yarn'"),
    ],
)
def test_an_impossible_value_is_refused_with_a_sentence(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        ModelConfig.from_hf(released(**changes))


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("sparse_topk_blocks", 0, "top_k=0 is not at least 1"),
        ("sparse_block_size", 0, "sparse_block_size=0 is not positive"),
        ("sparse_block_size", 24, "block_size=24 is not a multiple of 16"),
        ("sparse_score_type", "mean", "sparse_score_type 'mean'"),
        ("sparse_num_index_heads", 8, "8 index heads do not pair with 4"),
        ("sparse_init_block", 16, "cannot hold 17 forced blocks"),
    ],
)
def test_an_impossible_indexer_is_refused_with_a_sentence(key, value, sentence):
    root = released()
    root["text_config"]["sparse_attention_config"][key] = value
    with pytest.raises(ValueError, match=sentence):
        ModelConfig.from_hf(root)


def test_a_missing_key_is_named():
    root = released()
    del root["text_config"]["num_local_experts"]
    with pytest.raises(ValueError, match="no num_local_experts"):
        ModelConfig.from_hf(root)


def test_another_model_is_refused():
    with pytest.raises(ValueError, match="model_type 'llama'"):
        ModelConfig.from_hf(RELEASED | {"model_type": "llama"})


def test_configs_are_hashable():
    assert len({tiny(), tiny_random(), tiny()}) == 2
