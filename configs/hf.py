"""`config.json` -> the fields of `ModelConfig`: reads the released M3 (BF16, MXFP8) and M3.1-Flash
files and what transformers writes back.

Source of the keys: spec/model sections 1 and 6. Released files say `sparse_attention_config`,
`moe_layer_freq`, `rotary_dim`; transformers rewrites them as `index_*`, `layer_types`,
`mlp_layer_types` and `rope_parameters`. Both are accepted.
"""

import json
from collections.abc import Mapping
from typing import Any

from configs import hf_quantization
from configs.parts import (
    AttentionConfig,
    IndexerConfig,
    MLPConfig,
    MoEConfig,
    check,
)

Json = Mapping[str, Any]
VISION_KEYS = (
    "vision_config",
    "image_token_index",
    "video_token_index",
    "image_seq_length",
    "process_image_mode",
    "projector_hidden_act",
    "projector_hidden_size",
    "multimodal_projector_bias",
    "vision_feature_layer",
    "vision_feature_select_strategy",
    "image_grid_pinpoints",
    "img_token_compression_config",
)
FIXED = {  # what other models of this family vary and this code does not
    "tie_word_embeddings": False,
    "attention_output_gate": False,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_gemma_norm": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "n_shared_experts": 1,
}
LAYER_KINDS = {
    "layer_types": {"full_attention": 0, "minimax_m3_sparse": 1},
    "mlp_layer_types": {"dense": 0, "sparse": 1},
}
PADDED_VOCABULARIES = {200064: 200061}  # the released tokenizer ends at id 200060


def read(root: Json) -> dict[str, Any]:
    """The fields of `ModelConfig` (see `ModelConfig.from_hf`)."""
    text = root.get("text_config", root)
    check(isinstance(text, Mapping), "text_config of config.json is not an object")
    kind = root.get("model_type", "minimax_m3_vl")
    known = kind in ("minimax_m3_vl", "minimax_m3_vl_text", "minimax_m3")
    check(known, f"model_type {kind!r} is not a MiniMax-M3 model")
    for key, wanted in FIXED.items():
        value = text.get(key, wanted)
        check(value == wanted, f"{key}={value!r} is not supported: M3 has {wanted!r}")
    num_layers = _need(text, "num_hidden_layers")
    vocab_size = _need(text, "vocab_size")
    vision = {key: root[key] for key in VISION_KEYS if key in root}
    return dict(
        vocab_size=vocab_size,
        num_tokens=text.get("num_tokens", PADDED_VOCABULARIES.get(vocab_size, vocab_size)),
        hidden_size=_need(text, "hidden_size"),
        sparse_layers=_layers(_sparse(text), "sparse_attention_freq", num_layers),
        moe_layers=_layers(_routed(text, num_layers), "moe_layer_freq", num_layers),
        max_context=_need(text, "max_position_embeddings"),
        norm_eps=text.get("rms_norm_eps", 1e-6),
        attention=attention(text),
        indexer=_indexer(text),
        mlp=mlp(text, _need(text, "dense_intermediate_size")),
        moe=MoEConfig(
            num_experts=_need(text, "num_local_experts"),
            experts_per_token=_need(text, "num_experts_per_tok"),
            expert_dim=_need(text, "intermediate_size"),
            shared_dim=_need(text, "shared_intermediate_size"),
            routed_scale=text.get("routed_scaling_factor", 1.0),
        ),
        quantization=hf_quantization.read(
            root.get("quantization_config") or text.get("quantization_config")
        ),
        vision=json.dumps(vision, sort_keys=True) if vision else "",
    )


def attention(text: Json) -> AttentionConfig:
    """Heads and rotary embedding of a `text_config`, the drafter's too."""
    head_dim = _need(text, "head_dim")
    check(isinstance(head_dim, int), f"head_dim={head_dim!r} is not a whole number")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    check(kind == "default", f"rope type {kind!r} is not supported: M3 has no rope scaling")
    written = text.get("rotary_dim")
    factor = rope.get("partial_rotary_factor", text.get("partial_rotary_factor"))
    # transformers reads the factor and ignores rotary_dim: what it wrote back decides
    if factor is not None:
        rotary_dim = int(head_dim * factor)
    elif written is not None:
        rotary_dim = int(written)
    else:
        raise ValueError("config.json has neither rotary_dim nor partial_rotary_factor")
    agree = written in (None, rotary_dim) or "partial_rotary_factor" in rope
    check(agree, f"rotary_dim={written} but head_dim x partial_rotary_factor is {rotary_dim}")
    return AttentionConfig(
        num_heads=_need(text, "num_attention_heads"),
        num_kv_heads=_need(text, "num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=float(rope.get("rope_theta", text.get("rope_theta", 5e6))),
    )


def mlp(text: Json, dense_dim: int) -> MLPConfig:
    """The dense MLP of a `text_config`, the drafter's too."""
    return MLPConfig(
        dense_dim=dense_dim,
        alpha=text.get("swiglu_alpha", 1.702),
        limit=text.get("swiglu_limit", 7.0),
        beta=text.get("swiglu_beta", 1.0),
    )


def _indexer(text: Json) -> IndexerConfig:
    sparse = text.get("sparse_attention_config") or {}
    kind = sparse.get("sparse_score_type", "max")
    check(
        kind == "max",
        f"sparse_score_type {kind!r} is not supported: MSA scores a block by its maximum",
    )
    block_size = sparse.get("sparse_block_size", text.get("index_block_size", 128))
    check(block_size > 0, f"sparse_block_size={block_size} is not positive")
    local = sparse.get("sparse_local_block", text.get("index_local_blocks", 1))
    init = sparse.get("sparse_init_block", 0)
    if "sparse_local_tokens" in sparse:  # older configs count tokens
        local = -(-sparse["sparse_local_tokens"] // block_size) + 1
    if "sparse_init_tokens" in sparse:
        init = -(-sparse["sparse_init_tokens"] // block_size)
    return IndexerConfig(
        num_heads=sparse.get("sparse_num_index_heads", text.get("index_n_heads", 4)),
        head_dim=sparse.get("sparse_index_dim", text.get("index_head_dim", 128)),
        block_size=block_size,
        top_k=sparse.get("sparse_topk_blocks", text.get("index_topk_blocks", 16)),
        init_blocks=init,
        local_blocks=local,
    )


def _sparse(text: Json) -> list[int] | None:
    sparse = text.get("sparse_attention_config") or {}
    if "sparse_attention_freq" in sparse:
        return sparse["sparse_attention_freq"]
    if "layer_types" in text:
        return _kinds(text, "layer_types")
    return None


def _routed(text: Json, num_layers: int) -> list[int] | None:
    if text.get("moe_layer_freq") is not None:
        freq = text["moe_layer_freq"]
        return [freq] * num_layers if isinstance(freq, int) else freq
    if "mlp_layer_types" in text:
        return _kinds(text, "mlp_layer_types")
    return None


def _kinds(text: Json, key: str) -> list[int]:
    known = LAYER_KINDS[key]
    for kind in text[key]:
        check(kind in known, f"{key} has {kind!r}, which is not one of {', '.join(known)}")
    return [known[kind] for kind in text[key]]


def _layers(entries: list[int] | None, key: str, num_layers: int) -> tuple[bool, ...]:
    if entries is None:
        raise ValueError(f"config.json has no {key}")
    check(len(entries) == num_layers, f"{key} has {len(entries)} entries for {num_layers} layers")
    return tuple(bool(entry) for entry in entries)


def _need(section: Json, key: str) -> Any:
    check(key in section, f"config.json has no {key}")
    return section[key]
