"""What is read: every form that checkpoints come in, against values from an encoder of its own."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from minimax_jax.checkpoint import load_model, parameters_of
from minimax_jax.checkpoint.folder import read_config
from minimax_jax.quantize import form_of
from pallas_kernels.layouts.nvfp4 import NVFP4Tensor
from tests.checkpoint import files
from tests.checkpoint.files import M31, assert_identical, assert_same, load

CONFIG = files.two_layers()
MOE = "language_model.model.layers.1.block_sparse_moe."
ATTENTION = "language_model.model.layers.1.self_attn."


def form(model, path: str) -> str:
    return form_of(parameters_of(model)[path].get_value())


@pytest.mark.parametrize(
    ("projections", "experts", "forms"),
    [
        (files.plain, files.plain, ("plain", "plain")),
        (files.mxfp8, files.mxfp8, ("mxfp8", "mxfp8")),
        (files.mxfp8, files.compressed_tensors, ("mxfp8", "nvfp4")),
        (files.mxfp8, files.modelopt, ("mxfp8", "nvfp4")),
        (files.plain, files.modelopt, ("plain", "nvfp4")),
        (files.mxfp8, files.plain, ("mxfp8", "plain")),
    ],
    ids=["bf16", "mxfp8", "m3.1", "modelopt mixed", "modelopt", "mxfp8, experts bf16"],
)
@pytest.mark.parametrize("shards", [1, 3])
def test_weights_are_read_exactly_and_stay_in_their_form(
    projections, experts, forms, shards, tmp_path
):
    tensors, values = files.released(CONFIG, projections, experts)
    model = load(files.write(tmp_path, CONFIG, tensors, shards))
    assert form(model, "layers.0.mlp.up_proj.weight") == forms[0]
    assert form(model, "layers.1.attention.indexer.k_proj.weight") == forms[0]
    assert form(model, "layers.1.mlp.experts.w2.weight") == forms[1]
    assert_same(model, files.expected_by_path(CONFIG, values))


def test_index_projections_are_taken_in_the_form_they_have(tmp_path):
    tensors, values = files.released(CONFIG, files.mxfp8, files.compressed_tensors)
    name, rng = f"{ATTENTION}index_q_proj.weight", np.random.default_rng(5)
    del tensors[f"{name}_scale_inv"]
    stored, values[name] = files.plain(name, values[name].shape, rng)
    model = load(files.write(tmp_path, CONFIG, tensors | stored, quantization=M31))
    assert form(model, "layers.1.attention.indexer.q_proj.weight") == "plain"
    assert form(model, "layers.1.attention.indexer.k_proj.weight") == "mxfp8"
    assert_same(model, files.expected_by_path(CONFIG, values))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_global_scale_may_be_a_scalar_or_have_one_element(shape, tmp_path):
    tensors, values = files.released(CONFIG, files.mxfp8, files.compressed_tensors)
    for name in tensors:
        if name.endswith("global_scale"):
            tensors[name] = tensors[name].reshape(shape)
    model = load(files.write(tmp_path, CONFIG, tensors, quantization=M31))
    assert_same(model, files.expected_by_path(CONFIG, values))


@pytest.mark.parametrize("dtype", ["uint8", "float8_e8m0fnu"])
def test_exponents_may_be_called_weight_scale_and_be_typed(dtype, tmp_path):
    tensors, values = files.released(CONFIG, files.mxfp8, files.modelopt)
    for name in [name for name in tensors if name.endswith("weight_scale_inv")]:
        tensors[name.removesuffix("_inv")] = tensors.pop(name).view(dtype)
    model = load(files.write(tmp_path, CONFIG, tensors))
    assert_same(model, files.expected_by_path(CONFIG, values))


def test_both_conventions_of_the_outer_scale_give_equal_values(tmp_path):
    """F87: a number divides in one file, its reciprocal multiplies in the other."""
    dividing, _ = files.released(CONFIG, files.plain, files.compressed_tensors)
    multiplying = {}
    for name, value in dividing.items():
        if name.endswith("global_scale"):
            dividing[name] = np.full(1, 4096, np.float32)
            name, value = name.replace("global_scale", "scale_2"), np.full((), 2.0**-12, "f4")
        multiplying[name.replace("weight_packed", "weight")] = value
    one = load(files.write(tmp_path / "one", CONFIG, dividing))
    two = load(files.write(tmp_path / "two", CONFIG, multiplying))
    assert_same(one, files.values_of(two))


def test_gate_and_up_keep_their_own_outer_scales(tmp_path):
    """F88: one scalar for both would be off by 2x."""
    tensors, values = files.released(CONFIG, files.plain, files.compressed_tensors)
    for e in range(CONFIG.moe.num_experts):
        for w, scale in {"w1": 1.0, "w3": 0.5}.items():
            name = f"{MOE}experts.{e}.{w}.weight"
            values[name] *= tensors[f"{name}_global_scale"] / np.float32(scale)
            tensors[f"{name}_global_scale"] = np.full(1, scale, np.float32)
    model = load(files.write(tmp_path, CONFIG, tensors))
    actual = files.values_of(model)
    for w in ("w1", "w3"):
        wanted = files.expected_by_path(CONFIG, values)[f"layers.1.mlp.experts.{w}.weight"]
        np.testing.assert_allclose(actual[f"layers.1.mlp.experts.{w}.weight"], wanted, rtol=1e-6)


def test_an_outer_scale_counts_once_and_for_its_own_expert(tmp_path):
    """F90: multiplied by 4 for one expert, its weights are exactly 4x, not 1x and not 16x."""
    tensors, _ = files.released(CONFIG, files.plain, files.modelopt)
    before = files.values_of(load(files.write(tmp_path / "a", CONFIG, tensors)))
    name = f"{MOE}experts.3.w2.weight_scale_2"
    tensors[name] = tensors[name] * np.float32(4)
    after = files.values_of(load(files.write(tmp_path / "b", CONFIG, tensors)))
    path = "layers.1.mlp.experts.w2.weight"
    factors = np.array([4 if e == 3 else 1 for e in range(CONFIG.moe.num_experts)], np.float32)
    np.testing.assert_array_equal(after[path], before[path] * factors[:, None, None])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_router_is_float32_from_file_to_memory(dtype, tmp_path):
    """F93: in bf16 these four biases would fall together."""
    tensors, _ = files.released(CONFIG)
    bias = np.resize(np.float32([7.000, 7.004, 7.008, 7.012]), CONFIG.moe.num_experts)
    tensors[f"{MOE}e_score_correction_bias"] = bias
    model, _ = load_model(files.write(tmp_path, CONFIG, tensors), dtype=dtype)
    parameters = parameters_of(model)
    assert parameters["layers.1.mlp.router.weight"].get_value().dtype == jnp.float32
    loaded = parameters["layers.1.mlp.router.bias"].get_value()
    assert loaded.dtype == jnp.float32
    np.testing.assert_array_equal(loaded, bias)
    assert parameters["norm.weight"].get_value().dtype == dtype


def fused(tensors: files.Tensors, *, interleaved: bool = False) -> files.Tensors:
    """The released names as transformers' text-only model saves them."""
    out = dict(tensors)

    def join(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        both = np.stack([gate, up], axis=1) if interleaved else np.stack([gate, up])
        return both.reshape(-1, gate.shape[-1])

    for name in [n for n in out if n.endswith("gate_proj.weight")]:
        up = out.pop(name.replace("gate_proj", "up_proj"))
        out[name.replace("gate_proj", "gate_up_proj")] = join(out.pop(name), up)
    experts = range(CONFIG.moe.num_experts)
    w1, w3, w2 = (
        [out.pop(f"{MOE}experts.{e}.{w}.weight") for e in experts] for w in ("w1", "w3", "w2")
    )
    out[f"{MOE}experts.gate_up_proj"] = np.stack([join(g, u) for g, u in zip(w1, w3, strict=True)])
    out[f"{MOE}experts.down_proj"] = np.stack(w2)
    out[f"{MOE}gate.e_score_correction_bias"] = out.pop(f"{MOE}e_score_correction_bias")
    return {
        name.replace("language_model.lm_head", "lm_head")
        .replace("language_model.model.", "model.")
        .replace("block_sparse_moe", "mlp")
        .replace("self_attn.index_", "self_attn.indexer."): value
        for name, value in out.items()
    }


def test_stacked_fused_and_separate_experts_are_one_model(tmp_path):
    """F10, F11, F98: gate rows first, interleaved, or w1 and w3 apart."""
    tensors, values = files.released(CONFIG)
    expected = files.expected_by_path(CONFIG, values)
    assert_same(load(files.write(tmp_path / "w1 w3", CONFIG, tensors)), expected)
    folder = files.write(tmp_path / "halves", CONFIG, fused(tensors))
    assert_same(load(folder), expected)
    folder = files.write(tmp_path / "woven", CONFIG, fused(tensors, interleaved=True))
    assert_same(load(folder, gate_up="interleaved"), expected)


@pytest.mark.parametrize("chunk", [1, 100, 1000])
def test_values_are_cast_and_picked_apart_in_chunks(chunk, tmp_path, monkeypatch):
    monkeypatch.setattr("minimax_jax.checkpoint.tensor_file.CHUNK_BYTES", chunk)
    tensors, values = files.released(CONFIG)
    folder = files.write(tmp_path, CONFIG, fused(tensors, interleaved=True))
    assert_same(load(folder, gate_up="interleaved"), files.expected_by_path(CONFIG, values))


def test_fused_mxfp8_rows_take_their_scales_along(tmp_path):
    tensors, values = files.released(CONFIG, files.mxfp8)
    for half in ("weight", "weight_scale_inv"):
        names = [f"language_model.model.layers.0.mlp.{x}_proj.{half}" for x in ("gate", "up")]
        both = [tensors.pop(name).view(np.uint8) for name in names]
        dtype = files.E4M3 if half == "weight" else np.uint8
        name = names[0].replace("gate_proj", "gate_up_proj")
        tensors[name] = np.concatenate(both).view(dtype)
    model = load(files.write(tmp_path, CONFIG, tensors))
    assert_same(model, files.expected_by_path(CONFIG, values))


@pytest.mark.parametrize("prefix", ["model.language_model.", "model."])
def test_names_may_have_the_prefixes_of_transformers(prefix, tmp_path):
    tensors, values = files.released(CONFIG)
    renamed = {
        n.replace("language_model.lm_head", "lm_head").replace("language_model.model.", prefix): v
        for n, v in tensors.items()
    }
    model = load(files.write(tmp_path, CONFIG, renamed))
    assert_same(model, files.expected_by_path(CONFIG, values))


@pytest.mark.parametrize(
    "naming", ["{}", "re:.*{}$", "*{}"], ids=["exact", "regular expression", "glob"]
)
def test_a_map_of_formats_in_the_names_of_files_is_accepted(naming, tmp_path):
    """F07: attention MXFP8, experts NVFP4, router and norms plain, said layer by layer."""
    tensors, values = files.released(CONFIG, files.mxfp8, files.modelopt)
    said = {}
    for name in tensors:
        if name.endswith(("weight_scale_inv", "weight_scale_2")):
            algorithm = "MXFP8" if name.endswith("inv") else "NVFP4"
            module = name.rpartition(".weight_")[0]
            said[naming.format(module)] = {"quant_algo": algorithm}
    section = {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": said,
        "exclude_modules": ["lm_head", "*block_sparse_moe.gate", "vision_tower"],
    }
    model = load(files.write(tmp_path, CONFIG, tensors, quantization=section))
    assert_same(model, files.expected_by_path(CONFIG, values))


def test_known_tensors_are_counted_and_not_loaded(tmp_path):
    tensors, values = files.released(CONFIG, files.mxfp8, files.compressed_tensors)
    tensors["vision_tower.vision_model.pre_layrnorm.weight"] = np.ones(8, np.float32)
    tensors["multi_modal_projector.linear_1.bias"] = np.ones(8, np.float32)
    tensors["language_model.model.mtp.layers.0.eh_proj.weight"] = np.ones(8, np.float32)
    tensors["language_model.model.dspark.fc.weight"] = np.ones(8, np.float32)
    tensors[f"{MOE}experts.0.w2.input_global_scale"] = np.ones(1, np.float32)
    folder = files.write(tmp_path, CONFIG, tensors, quantization=M31)
    model, report = load_model(folder, dtype="float32")
    assert_same(model, files.expected_by_path(CONFIG, values))
    assert report.not_loaded == {"vision": 2, "mtp": 1, "dspark": 1, "activation scale": 1}
    assert report.tensors == len(tensors) - 5


def test_cache_scales_of_one_are_told_once_and_others_refused(tmp_path):
    """F08."""
    tensors, _ = files.released(CONFIG)
    for i in range(2):
        for scale in ("k_proj.k_scale", "v_proj.v_scale"):
            name = f"language_model.model.layers.{i}.self_attn.{scale}"
            tensors[name] = np.ones((), np.float32)
    folder = files.write(tmp_path, CONFIG, tensors)
    with pytest.warns(UserWarning, match="4 k_scale and v_scale tensors are not used") as warned:
        load(folder)
    assert len(warned) == 1
    tensors[f"{ATTENTION}k_proj.k_scale"] = np.full((), 0.5, np.float32)
    with pytest.raises(ValueError, match=r"k_proj.k_scale is \[0.5\], but the cache's outer scale"):
        load(files.write(tmp_path, CONFIG, tensors))


def test_nvfp4_keeps_the_number_that_the_file_has(tmp_path):
    tensors, _ = files.released(CONFIG, files.plain, files.compressed_tensors)
    model = load(files.write(tmp_path, CONFIG, tensors))
    weight = parameters_of(model)["layers.1.mlp.experts.w1.weight"].get_value()
    assert isinstance(weight, NVFP4Tensor) and weight.divides
    names = [f"{MOE}experts.{e}.w1.weight_global_scale" for e in range(CONFIG.moe.num_experts)]
    np.testing.assert_array_equal(weight.outer, np.concatenate([tensors[n] for n in names]))


def test_the_config_is_read_with_the_drafter_of_its_folder(tmp_path):
    config = files.two_layers()
    folder = files.write(tmp_path, config, files.released(config)[0])
    assert read_config(folder) == config
    drafter = {
        "num_hidden_layers": 2,
        "dspark_ffn_hidden_size": 128,
        "dspark_markov_rank": 16,
        "dspark_block_size": 7,
        "dspark_noise_token_id": 5,
        "sliding_window": 128,
        "dspark_target_layer_ids": [0, 1],
    }
    (folder / "dspark").mkdir()
    (folder / "dspark" / "config.json").write_text(json.dumps({"text_config": drafter}))
    read = read_config(folder)
    assert read.drafter is not None and read.drafter.target_layers == (0, 1)


def test_progress_is_told_leaf_by_leaf(tmp_path):
    seen = []
    folder = files.write(tmp_path, CONFIG, files.released(CONFIG)[0])
    model, report = load_model(
        folder, dtype="bfloat16", progress=lambda name, nbytes: seen.append((name, nbytes))
    )
    assert [name for name, _ in seen] == list(parameters_of(model))
    assert sum(nbytes for _, nbytes in seen) == report.nbytes
    assert f"{report.tensors} tensors" in str(report)


def test_a_second_load_gives_the_same_bits(tmp_path):
    folder = files.write(tmp_path, CONFIG, files.released(CONFIG, files.mxfp8, files.modelopt)[0])
    assert_identical(load(folder), load(folder))
