"""The model's shape: one frozen, hashable `ModelConfig`, from a checkpoint's `config.json` or a
preset.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from configs import hf
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
            last = max(self.drafter.target_layers)
            check(last < layers, f"the drafter taps layer {last} of a model of {layers} layers")

    @classmethod
    def from_hf(cls, root: Mapping[str, Any], drafter: Mapping[str, Any] | None = None) -> Self:
        """The config of a checkpoint, from its parsed `config.json` (and `dspark/config.json`, if
        it has one).

        Raises ValueError with one sentence for a key that is missing or a value that cannot be.
        """
        return cls(**hf.read(root, drafter))

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that `from_hf` reads back to the same config, in the released files'
        keys.
        """
        return hf.write(self)

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.sparse_layers)

    @property
    def num_moe_layers(self) -> int:
        """How many layers route to experts."""
        return sum(self.moe_layers)
