"""Random MiniMax-M3 models of transformers in float32, and the inputs and outputs of their
sub-modules.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

torch = pytest.importorskip("torch")
m3 = pytest.importorskip("transformers.models.minimax_m3_vl")

# hidden, heads, head_dim, rotary, block, top-k, prompt: each prompt is ten times what is chosen
SIZES = {
    "small": {"hidden": 64, "head_dim": 16, "block": 16, "top_k": 2, "experts": 8, "tokens": 320},
    "middle": {"hidden": 96, "head_dim": 32, "block": 32, "top_k": 2, "experts": 6, "tokens": 640},
    "wide": {"hidden": 128, "head_dim": 32, "block": 16, "top_k": 4, "experts": 16, "tokens": 640},
}
PATTERNS = {
    "m3": {"sparse": [0, 1, 1], "moe": [0, 1, 1]},
    "m3.1": {"sparse": [1, 1, 1], "moe": [0, 1, 1]},
}


def fresh_seed() -> int:
    """A seed that is new in each run; printed, so that a failure can be run again."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    return seed


def text_config(size: str, pattern: str) -> "m3.MiniMaxM3VLTextConfig":
    """A small config in the released files' keys."""
    s, p = SIZES[size], PATTERNS[pattern]
    config = m3.MiniMaxM3VLTextConfig(
        vocab_size=512,
        hidden_size=s["hidden"],
        intermediate_size=32,
        dense_intermediate_size=96,
        shared_intermediate_size=48,
        num_hidden_layers=len(p["sparse"]),
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=s["head_dim"],
        rotary_dim=s["head_dim"] // 2,
        partial_rotary_factor=0.5,
        rope_theta=5e6,
        num_local_experts=s["experts"],
        num_experts_per_tok=4,
        moe_layer_freq=p["moe"],
        hidden_act="swigluoai",
        sparse_attention_config={
            "use_sparse_attention": True,
            "sparse_index_dim": s["head_dim"],
            "sparse_num_index_heads": 4,
            "sparse_topk_blocks": s["top_k"],
            "sparse_block_size": s["block"],
            "sparse_disable_index_value": p["sparse"],
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_attention_freq": p["sparse"],
        },
        bos_token_id=1,
        eos_token_id=2,
    )
    config._attn_implementation = "eager"
    return config


def random_reference(config: "m3.MiniMaxM3VLTextConfig", seed: int) -> "m3.MiniMaxM3VLForCausalLM":
    """Norms and biases that are not zero, weights of a size that makes selection matter."""
    torch.manual_seed(seed)
    model = m3.MiniMaxM3VLForCausalLM(config).eval()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    with torch.no_grad():
        for name, tensor in tensors:
            if "inv_freq" not in name:
                scale = 0.3 if "norm" in name else 0.1 if "bias" in name else 0.15
                tensor.copy_(torch.randn(tensor.shape) * scale)
    return model


@dataclass
class Recording:
    """What went into and came out of each sub-module in one forward pass, by name. Of a router it
    is the experts that it chose.
    """

    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    logits: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def of(cls, model: "m3.MiniMaxM3VLForCausalLM", ids: np.ndarray) -> "Recording":
        """Runs one prompt [T]."""
        recording = cls()
        hooks = [
            module.register_forward_hook(recording._hook(name), with_kwargs=True)
            for name, module in model.named_modules()
            if ".layers." in name
        ]
        with torch.no_grad():
            recording.logits = model(torch.tensor(ids[None])).logits[0].numpy()
        for hook in hooks:
            hook.remove()
        return recording

    def _hook(self, name: str):
        def keep(module, arguments, keywords, output):
            first = arguments[0] if arguments else keywords["hidden_states"]
            of_interest = -1 if name.endswith(".gate") else 0  # a router ends with its choice
            result = output[of_interest] if isinstance(output, tuple) else output
            self.inputs[name] = first.numpy().copy()
            self.outputs[name] = result.numpy().copy()

        return keep
