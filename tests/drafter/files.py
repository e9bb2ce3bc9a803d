"""Drafter folders made in the tests from the specification's table (spec/dspark 1.2), with nothing
of ours but the config.
"""

import json
from pathlib import Path

import numpy as np

from configs.model import ModelConfig
from tests.checkpoint.files import Tensors, mxfp8, plain, write_index, write_tensors

D = "language_model.model.dspark."


def table(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Released name -> shape, and whether it is quantised."""
    c, dim, rows = config.drafter, config.hidden_size, config.vocab_size
    a, F, R = c.attention, c.mlp.dense_dim, c.markov_rank
    width, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    found = {
        f"{D}fc.weight": ((dim, dim * len(c.target_layers)), False),
        f"{D}hidden_norm.weight": ((dim,), False),
        f"{D}final_norm.weight": ((dim,), False),
        f"{D}markov_head.markov_w1.weight": ((rows, R), False),
        f"{D}markov_head.markov_w2.weight": ((rows, R), False),
        f"{D}confidence_head.proj.weight": ((1, dim + R), False),
        f"{D}confidence_head.proj.bias": ((1,), False),
    }
    for i in range(c.num_layers):
        layer = f"{D}layers.{i}.decoder_layer."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}{norm}.weight"] = (dim,), False
        for norm in ("q_norm", "k_norm"):
            found[f"{layer}self_attn.{norm}.weight"] = (a.head_dim,), False
        for proj, shape in {"q": (width, dim), "k": (kv, dim), "v": (kv, dim)}.items():
            found[f"{layer}self_attn.{proj}_proj.weight"] = shape, True
        found[f"{layer}self_attn.o_proj.weight"] = (dim, width), True
        for proj, shape in {"gate": (F, dim), "up": (F, dim), "down": (dim, F)}.items():
            found[f"{layer}mlp.{proj}_proj.weight"] = shape, True
    return found


def released(config: ModelConfig, seed: int = 0, quantized: bool = True) -> tuple[Tensors, Tensors]:
    """All tensors of a drafter, and the values of each weight."""
    rng, tensors, values = np.random.default_rng(seed), {}, {}
    for name, (shape, is_quantized) in table(config).items():
        encode = mxfp8 if is_quantized and quantized else plain
        stored, values[name] = encode(name, shape, rng)
        tensors.update(stored)
    return tensors, values


def write(folder: Path, config: ModelConfig, tensors: Tensors, root: dict | None = None) -> Path:
    """`config.json` and `dspark/` with its own, of one shard that is indexed; the target's weights
    are not needed.
    """
    (folder / "dspark").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    (folder / "dspark" / "config.json").write_text(json.dumps(root or config.drafter_to_hf()))
    name = "model-00001-of-00001.safetensors"
    write_tensors(folder / "dspark" / name, tensors)
    write_index(folder / "dspark", dict.fromkeys(tensors, name))
    return folder


def path_of(name: str) -> str:
    """The drafter's path of a released name."""
    renames = [
        (D, ""),
        ("decoder_layer.", ""),
        ("input_layernorm", "input_norm"),
        ("post_attention_layernorm", "post_attention_norm"),
        ("self_attn", "attention"),
        ("final_norm", "norm"),
        ("markov_head.markov_w1.weight", "markov.w1"),
        ("markov_head.markov_w2", "markov.w2"),
        ("confidence_head.proj", "confidence"),
    ]
    for old, new in renames:
        name = name.replace(old, new)
    return name
