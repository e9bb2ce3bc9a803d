"""The released `dspark/config.json`, from the specification's table (spec/dspark 1.1)."""

import copy


def released_drafter(**changes) -> dict:
    """The file, with keys of its `text_config` changed."""
    root = copy.deepcopy(_RELEASED)
    root["text_config"] |= changes
    return root


_RELEASED = {
    "architectures": ["DSparkMiniMaxDraftModel"],
    "dspark_block_size": 7,
    "dspark_markov_rank": 256,
    "dspark_noise_token_id": 200058,
    "dspark_target_layer_ids": [3, 17, 31, 45, 59],
    "dspark_config": {"hybrid_context_fusion": False},
    "dflash_config": {
        "num_hidden_layers": 5,
        "num_target_layers": 60,
        "target_layer_ids": [3, 17, 31, 45, 59],
    },
    "quantization_config": {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
    "text_config": {
        "num_hidden_layers": 5,
        "hidden_size": 6144,
        "vocab_size": 200064,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rotary_dim": 64,
        "rope_theta": 5000000,
        "dense_intermediate_size": 12288,
        "dspark_ffn_hidden_size": 12288,
        "dspark_use_dense_ffn": True,
        "moe_layer_freq": [0] * 5,
        "sparse_attention_config": None,
        "layer_types": ["sliding_attention"] * 5,
        "sliding_window": 4096,
        "use_gemma_norm": True,
        "dspark_block_size": 7,
        "dspark_noise_token_id": 200058,
        "dspark_target_layer_ids": [3, 17, 31, 45, 59],
        "dspark_markov_rank": 256,
        "dspark_markov_head_type": "vanilla",
        "dspark_hybrid_context_fusion": False,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
}
