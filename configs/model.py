"""The model's shape: one frozen, hashable `ModelConfig`, from a checkpoint's `config.json` or a
preset.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from configs import hf, hf_drafter, hf_quantization
from configs.parts import (
    AttentionConfig,
    DrafterConfig,
    IndexerConfig,
    MLPConfig,
    MoEConfig,
    QuantizationConfig,
    check,
    check_positive,
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A MiniMax-M3 family model. `sparse_layers` and `moe_layers` are independent lists, one entry
    a layer.
    """

    vocab_size: int  # V, rows of the embedding
    num_tokens: int  # rows that are tokens; the rest is padding and never sampled
    hidden_size: int  # D
    sparse_layers: tuple[bool, ...]
    moe_layers: tuple[bool, ...]
    max_context: int
    norm_eps: float
    attention: AttentionConfig
    indexer: IndexerConfig
    mlp: MLPConfig
    moe: MoEConfig
    drafter: DrafterConfig | None = None
    quantization: QuantizationConfig = QuantizationConfig()
    vision: str = ""  # the vision part of config.json as JSON text, written back unchanged

    def __post_init__(self) -> None:
        check_positive(self, "vocab_size", "hidden_size", "max_context")
        layers, moe_layers = len(self.sparse_layers), len(self.moe_layers)
        check(layers > 0, "the model has no layers")
        check(layers == moe_layers, f"{layers} attention layers but {moe_layers} MLP layers")
        tokens, rows = self.num_tokens, self.vocab_size
        check(1 <= tokens <= rows, f"num_tokens={tokens} is not in 1..vocab_size={rows}")
        index_heads, kv_heads = self.indexer.num_heads, self.attention.num_kv_heads
        pairs = index_heads == kv_heads or not any(self.sparse_layers)
        check(pairs, f"{index_heads} index heads do not pair with {kv_heads} key/value heads")
        if self.drafter is not None:
            self._check_drafter(self.drafter)

    @classmethod
    def from_hf(cls, root: Mapping[str, Any], drafter: Mapping[str, Any] | None = None) -> Self:
        """The config of a checkpoint, from its parsed `config.json` (and `dspark/config.json`, if
        it has one).

        Raises ValueError with one sentence for a key that is missing or a value that cannot be.
        """
        fields = hf.read(root)
        if drafter is not None:
            fields["drafter"] = hf_drafter.read(drafter, root, fields)
        return cls(**fields)

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that `from_hf` reads back to the same config, in the released files'
        keys.
        """
        attention, moe, mlp = self.attention, self.moe, self.mlp
        text = {
            "model_type": "minimax_m3_vl_text",
            "architectures": ["MiniMaxM3SparseForCausalLM"],
            "vocab_size": self.vocab_size,
            "num_tokens": self.num_tokens,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": attention.num_heads,
            "num_key_value_heads": attention.num_kv_heads,
            "head_dim": attention.head_dim,
            "rotary_dim": attention.rotary_dim,
            "partial_rotary_factor": attention.rotary_dim / attention.head_dim,
            "rope_theta": attention.rope_theta,
            "max_position_embeddings": self.max_context,
            "rms_norm_eps": self.norm_eps,
            "use_gemma_norm": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_head",
            "attention_output_gate": False,
            "hidden_act": "swigluoai",
            "swiglu_alpha": mlp.alpha,
            "swiglu_limit": mlp.limit,
            "swiglu_beta": mlp.beta,
            "intermediate_size": moe.expert_dim,
            "dense_intermediate_size": mlp.dense_dim,
            "shared_intermediate_size": moe.shared_dim,
            "n_shared_experts": 1,
            "num_local_experts": moe.num_experts,
            "num_experts_per_tok": moe.experts_per_token,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "routed_scaling_factor": moe.routed_scale,
            "moe_layer_freq": [int(x) for x in self.moe_layers],
            "tie_word_embeddings": False,
            "sparse_attention_config": self._indexer_to_hf(),
        }
        root = {
            "model_type": "minimax_m3_vl",
            "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
            "text_config": text,
            **(json.loads(self.vision) if self.vision else {}),
        }
        quantization = hf_quantization.write(self.quantization)
        return root | ({"quantization_config": quantization} if quantization else {})

    def drafter_to_hf(self) -> dict[str, Any]:
        """The `dspark/config.json` that `from_hf` reads back to the same drafter."""
        if self.drafter is None:
            raise ValueError("the model has no drafter")
        return hf_drafter.write(
            self.drafter,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            num_target_layers=self.num_layers,
        )

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.sparse_layers)

    @property
    def num_moe_layers(self) -> int:
        """How many layers route to experts."""
        return sum(self.moe_layers)

    def _check_drafter(self, drafter: DrafterConfig) -> None:
        last, layers = max(drafter.target_layers), self.num_layers
        check(last < layers, f"the drafter taps layer {last} of a model of {layers} layers")
        noise, rows = drafter.noise_token, self.vocab_size
        check(noise < rows, f"the drafter's noise token {noise} is not in 0..{rows - 1}")
        ours, theirs = ((a.num_kv_heads, a.head_dim) for a in (drafter.attention, self.attention))
        check(
            ours == theirs,
            f"the drafter's {ours[0]} key/value heads of {ours[1]} do not share pages with the "
            f"target's {theirs[0]} of {theirs[1]}",
        )

    def _indexer_to_hf(self) -> dict[str, Any]:
        indexer, sparse = self.indexer, [int(x) for x in self.sparse_layers]
        return {
            "use_sparse_attention": any(self.sparse_layers),
            "sparse_index_dim": indexer.head_dim,
            "sparse_num_index_heads": indexer.num_heads,
            "sparse_topk_blocks": indexer.top_k,
            "sparse_block_size": indexer.block_size,
            "sparse_score_type": "max",
            "sparse_init_block": indexer.init_blocks,
            "sparse_local_block": indexer.local_blocks,
            "sparse_attention_freq": sparse,
            "sparse_disable_index_value": sparse,
        }
