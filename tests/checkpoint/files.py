"""Checkpoints made in the tests, with nothing of ours: names and shapes from the specification's
table, number formats from their definitions, files by the safetensors library.

Each encoder returns a matrix's tensors and the float32 values that they stand for.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors import TensorSpec, safe_open, serialize_file

from configs.model import ModelConfig
from configs.presets import tiny_random
from minimax_jax.checkpoint import load_model, parameters_of
from minimax_jax.model import Model
from minimax_jax.quantize import dequantize_model

Tensors = dict[str, np.ndarray]
Encoder = Callable[[str, tuple[int, ...], np.random.Generator], tuple[Tensors, np.ndarray]]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E4M3, BF16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)
M31 = {
    "quant_method": "mxfp8",
    "weight_block_size": [1, 32],
    "group_size": 16,
    "moe_quant_algo": "NVFP4",
    "moe_quant_format": "nvfp4-pack-quantized",
    "kv_cache_quant_algo": "FP8",
    "index_k_quant_type": "nvfp4",
    "ignored_layers": ["lm_head", "model.embed_tokens", "vision_tower"],
}


def two_layers() -> ModelConfig:
    """One dense and one routed layer, the second with an indexer."""
    return replace(tiny_random(), sparse_layers=(False, True), moe_layers=(False, True))


def plain(name: str, shape: tuple[int, ...], rng: np.random.Generator):
    values = rng.normal(size=shape).astype(np.float32).astype(BF16)
    return {name: values}, values.astype(np.float32)


def mxfp8(name: str, shape: tuple[int, ...], rng: np.random.Generator):
    codes = rng.integers(0, 127, shape, np.uint8) | (rng.integers(0, 2, shape, np.uint8) << 7)
    exponents = rng.integers(118, 136, (shape[0], shape[1] // 32), np.uint8)
    scales = 2.0 ** (exponents.astype(np.float32) - 127)
    values = codes.view(E4M3).astype(np.float32) * scales.repeat(32, axis=1)
    return {name: codes.view(E4M3), f"{name}_scale_inv": exponents}, values


def _nvfp4(shape: tuple[int, ...], rng: np.random.Generator):
    codes = rng.integers(0, 16, shape, np.uint8)
    scales = rng.integers(1, 127, (shape[0], shape[1] // 16), np.uint8).view(E4M3)
    elements = E2M1[codes & 7] * np.where(codes & 8, np.float32(-1), np.float32(1))
    values = elements * scales.astype(np.float32).repeat(16, axis=1)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales, values


def compressed_tensors(name: str, shape: tuple[int, ...], rng: np.random.Generator):
    packed, scales, values = _nvfp4(shape, rng)
    outer = rng.uniform(1000, 30000, 1).astype(np.float32)
    tensors = {f"{name}_packed": packed, f"{name}_scale": scales, f"{name}_global_scale": outer}
    return tensors, values / outer


def modelopt(name: str, shape: tuple[int, ...], rng: np.random.Generator):
    packed, scales, values = _nvfp4(shape, rng)
    outer = np.asarray(rng.uniform(1e-4, 1e-2), np.float32)
    return {name: packed, f"{name}_scale": scales, f"{name}_scale_2": outer}, values * outer


def released(
    config: ModelConfig, projections: Encoder = plain, experts: Encoder = plain, seed: int = 0
) -> tuple[Tensors, Tensors]:
    """All tensors of a text model (specification 3.1), and the values of each weight."""
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    values: Tensors = {}

    def add(name: str, shape: tuple[int, ...], encode: Encoder = plain) -> None:
        stored, values[name] = encode(name, shape, rng)
        tensors.update(stored)

    D, a, moe, index = config.hidden_size, config.attention, config.moe, config.indexer
    L = "language_model.model."
    add(f"{L}embed_tokens.weight", (config.vocab_size, D))
    add("language_model.lm_head.weight", (config.vocab_size, D))
    add(f"{L}norm.weight", (D,))
    for i in range(config.num_layers):
        layer, width, kv = f"{L}layers.{i}.", a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        add(f"{layer}input_layernorm.weight", (D,))
        add(f"{layer}post_attention_layernorm.weight", (D,))
        attention = f"{layer}self_attn."
        for proj, shape in {"q": (width, D), "k": (kv, D), "v": (kv, D), "o": (D, width)}.items():
            add(f"{attention}{proj}_proj.weight", shape, projections)
        add(f"{attention}q_norm.weight", (a.head_dim,))
        add(f"{attention}k_norm.weight", (a.head_dim,))
        if config.sparse_layers[i]:
            rows = index.num_heads * index.head_dim
            add(f"{attention}index_q_proj.weight", (rows, D), projections)
            add(f"{attention}index_k_proj.weight", (index.head_dim, D), projections)
            add(f"{attention}index_q_norm.weight", (index.head_dim,))
            add(f"{attention}index_k_norm.weight", (index.head_dim,))
        routed = f"{layer}block_sparse_moe."
        mlp = f"{routed}shared_experts." if config.moe_layers[i] else f"{layer}mlp."
        F = moe.shared_dim if config.moe_layers[i] else config.mlp.dense_dim
        for proj, shape in {"gate": (F, D), "up": (F, D), "down": (D, F)}.items():
            add(f"{mlp}{proj}_proj.weight", shape, projections)
        if config.moe_layers[i]:
            E, F = moe.num_experts, moe.expert_dim
            router = rng.normal(size=(E, D)).astype(np.float32)
            tensors[f"{routed}gate.weight"] = values[f"{routed}gate.weight"] = router
            bias = f"{routed}e_score_correction_bias"
            tensors[bias] = values[bias] = rng.normal(size=E).astype(np.float32)
            for e in range(E):
                for w, shape in {"w1": (F, D), "w3": (F, D), "w2": (D, F)}.items():
                    add(f"{routed}experts.{e}.{w}.weight", shape, experts)
    return tensors, values


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A safetensors file, by the library."""
    kept = {name: np.ascontiguousarray(values) for name, values in tensors.items()}
    specs = {
        name: TensorSpec(
            dtype=v.dtype.name,
            shape=tensors[name].shape,
            data_ptr=v.ctypes.data,
            data_len=v.nbytes,
        )
        for name, v in kept.items()
    }
    serialize_file(specs, path, metadata={"format": "pt"})


def write(
    folder: Path, config: ModelConfig, tensors: Tensors, shards: int = 1, quantization=None
) -> Path:
    """A checkpoint folder; with several shards, tensors are dealt out in turn and indexed."""
    folder.mkdir(exist_ok=True)
    root = config.to_hf()
    if quantization is not None:
        root["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(root))
    if shards == 1:
        write_tensors(folder / "model.safetensors", tensors)
        return folder
    weight_map = {name: shard_name(i % shards, shards) for i, name in enumerate(sorted(tensors))}
    for i in range(shards):
        shard = shard_name(i, shards)
        write_tensors(folder / shard, {n: tensors[n] for n, f in weight_map.items() if f == shard})
    write_index(folder, weight_map)
    return folder


def shard_name(i: int, shards: int) -> str:
    return f"model-{i + 1:05}-of-{shards:05}.safetensors"


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    index = {"metadata": {}, "weight_map": dict(weight_map)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read_index(folder: Path) -> dict[str, str]:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def headers(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Dtype and shape of every tensor of a folder, by the library."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                part = file.get_slice(name)
                found[name] = (part.get_dtype(), part.get_shape())
    return found


def read_tensor(folder: Path, name: str) -> bytes:
    """A tensor's bytes, cut out of its file by the header's offsets."""
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        if name in header:
            begin, end = header[name]["data_offsets"]
            return content[start + begin : start + end]
    raise KeyError(name)


def values_of(model: Model) -> Tensors:
    """The model's weights in float32, by path."""
    return {
        path: np.asarray(p.get_value(), np.float32)
        for path, p in parameters_of(dequantize_model(model)).items()
    }


def expected_by_path(config: ModelConfig, values: Tensors) -> Tensors:
    """`values` of `released`, under the model's paths, experts stacked."""
    renames = [
        ("language_model.model.", ""),
        ("language_model.lm_head", "head"),
        ("embed_tokens.weight", "embedding"),
        ("input_layernorm", "input_norm"),
        ("post_attention_layernorm", "post_attention_norm"),
        ("self_attn.index_", "attention.indexer."),
        ("self_attn", "attention"),
        ("block_sparse_moe.gate.", "mlp.router."),
        ("block_sparse_moe.e_score_correction_bias", "mlp.router.bias"),
        ("block_sparse_moe.shared_experts", "mlp.shared"),
        ("block_sparse_moe", "mlp"),
    ]
    found: Tensors = {}
    for name, value in values.items():
        for old, new in renames:
            name = name.replace(old, new)
        if ".experts." in name:
            before, _, after = name.partition(".experts.")
            e, _, rest = after.partition(".")
            stack = found.setdefault(
                f"{before}.experts.{rest}", np.zeros((config.moe.num_experts, *value.shape))
            )
            stack[int(e)] = value
        else:
            found[name] = value
    return {name: value.astype(np.float32) for name, value in found.items()}


def assert_same(model: Model, expected: Tensors) -> None:
    """Every weight of the model has exactly these values."""
    actual = values_of(model)
    assert actual.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(actual[path], value, err_msg=path, strict=True)


def load(folder: Path, **options) -> Model:
    """The model of a folder, in float32."""
    return load_model(folder, dtype="float32", **options)[0]


def assert_identical(one: Model, other: Model) -> None:
    """Two models have the same weights: same forms, same bits."""
    left, right = ([p.get_value() for p in parameters_of(m).values()] for m in (one, other))
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
