"""What is written: round trips in every format, names and shards, and folders that are all there or
not at all.
"""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.presets import tiny, tiny_random
from minimax_jax.checkpoint import load_model, parameters_of, save_model
from minimax_jax.checkpoint.folder import read_config
from minimax_jax.quantize import FORMATS, quantize_model
from pallas_kernels.layouts.nvfp4 import NVFP4Tensor
from tests.checkpoint import files
from tests.checkpoint.files import assert_identical, assert_same, load, values_of
from tests.model.models import random_model

CONFIG = files.two_layers()
EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.3.w1.weight"


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG)


@pytest.mark.parametrize("config", [tiny_random(), tiny()], ids=["tiny_random", "tiny"])
@pytest.mark.parametrize("name", [None, *FORMATS])
def test_what_is_saved_is_loaded_bit_for_bit(config, name, tmp_path):
    model = random_model(config)
    if name is not None:
        model = quantize_model(model, name)
    save_model(model, tmp_path / "once")
    loaded = load_model(tmp_path / "once", dtype="float32")[0]
    assert values_of(loaded).keys() == values_of(model).keys()
    assert_same(loaded, values_of(model))
    save_model(loaded, tmp_path / "twice")
    assert_identical(load(tmp_path / "twice"), loaded)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_quantises_as_the_policy_says_and_makes_the_rest_bf16(model, name, tmp_path):
    save_model(model, tmp_path / "new", format=name)
    loaded, _ = load_model(tmp_path / "new", dtype="bfloat16")
    as_bf16 = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model)
    for path, parameter in parameters_of(as_bf16).items():
        if ".router." in path:
            parameter.set_value(parameters_of(model)[path].get_value())
    quantised = values_of(quantize_model(model, name))
    plain = values_of(as_bf16)
    for path, value in values_of(loaded).items():
        is_matrix = path.endswith("_proj.weight") or ".experts." in path
        wanted = quantised if is_matrix and name != "bf16" else plain
        np.testing.assert_array_equal(value, wanted[path], err_msg=path)


def test_the_files_have_the_released_names_and_dtypes(model, tmp_path):
    """Specification 3.1-3.3, read by the safetensors library."""
    names = {
        "bf16": files.released(CONFIG)[0],
        "mxfp8": files.released(CONFIG, files.mxfp8, files.mxfp8)[0],
        "m3.1": files.released(CONFIG, files.mxfp8, files.compressed_tensors)[0],
    }
    dtypes = {"bfloat16": "BF16", "float32": "F32", "uint8": "U8", "float8_e4m3fn": "F8_E4M3"}
    for name, tensors in names.items():
        save_model(model, tmp_path / name, format=name)
        wanted = {n: (dtypes[v.dtype.name], list(v.shape)) for n, v in tensors.items()}
        assert files.headers(tmp_path / name) == wanted


def test_outer_scales_keep_their_convention_and_their_bits(tmp_path):
    for encoder, divides in ((files.modelopt, False), (files.compressed_tensors, True)):
        tensors, _ = files.released(CONFIG, files.mxfp8, encoder)
        source = files.write(tmp_path / f"{divides}", CONFIG, tensors)
        first = load(source)
        save_model(first, tmp_path / f"{divides} saved")
        second = load(tmp_path / f"{divides} saved")
        assert_identical(first, second)
        weight = parameters_of(second)["layers.1.mlp.experts.w1.weight"].get_value()
        assert isinstance(weight, NVFP4Tensor) and weight.divides is divides
        root = json.loads((tmp_path / f"{divides} saved" / "config.json").read_text())
        # the name of compressed-tensors' format is for files that have it
        assert ("moe_quant_format" in root["quantization_config"]) is divides


def test_a_multiplying_scale_becomes_its_reciprocal_in_the_released_format(tmp_path):
    tensors, _ = files.released(CONFIG, files.mxfp8, files.modelopt)
    model = load(files.write(tmp_path / "modelopt", CONFIG, tensors))
    save_model(model, tmp_path / "released", format="m3.1")
    assert f"{EXPERT}_global_scale" in files.headers(tmp_path / "released")
    released, path = load(tmp_path / "released"), "layers.1.mlp.experts.w1.weight"
    np.testing.assert_allclose(values_of(released)[path], values_of(model)[path], rtol=3e-7)


def test_shards_hold_at_most_what_is_asked_and_are_indexed(model, tmp_path):
    save_model(model, tmp_path / "new", format="m3.1", max_shard_bytes=50_000)
    index = files.read_index(tmp_path / "new")
    shards = sorted((tmp_path / "new").glob("*.safetensors"))
    assert len(shards) > 3 and set(index.values()) == {path.name for path in shards}
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    embedding = CONFIG.vocab_size * CONFIG.hidden_size * 2
    assert all(path.stat().st_size < max(50_000, embedding) + 20_000 for path in shards)
    save_model(model, tmp_path / "one", format="m3.1")
    assert_identical(load(tmp_path / "new"), load(tmp_path / "one"))


def known_tensors() -> files.Tensors:
    rng = np.random.default_rng(1)
    patch = "vision_tower.vision_model.embeddings.patch_embedding.weight"
    return {
        patch: rng.normal(size=(4, 3, 2, 2, 2)).astype(np.float32),
        "patch_merge_mlp.linear_1.bias": rng.normal(size=7).astype(files.BF16),
        "language_model.model.mtp.layers.0.eh_proj.weight": rng.integers(0, 127, (3, 5), np.uint8),
        EXPERT.replace("weight", "input_global_scale"): np.full(1, 3.5, np.float32),
    }


COMPANIONS = {
    "tokenizer.json": '{"version": "1.0"}',
    "tokenizer_config.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "generation_config.json": '{"temperature": 1.0}',
}


def a_source(folder, tensors: files.Tensors):
    files.write(folder, CONFIG, tensors | known_tensors(), quantization=files.M31)
    for name, text in COMPANIONS.items():
        (folder / name).write_text(text)
    (folder / "modeling_custom.py").write_text("raise SystemExit")
    (folder / "dspark").mkdir()
    (folder / "dspark" / "model.safetensors").write_bytes(b"as it is")
    root = json.loads((folder / "config.json").read_text())
    root |= {"auto_map": {"AutoConfig": "modeling_custom.Config"}, "image_seq_length": 576}
    root["text_config"]["bos_token_id"] = 4
    (folder / "config.json").write_text(json.dumps(root))
    return folder


def test_what_is_not_loaded_comes_along_byte_for_byte(tmp_path):
    tensors, _ = files.released(CONFIG, files.mxfp8, files.compressed_tensors)
    source = a_source(tmp_path / "source", tensors)
    model, _ = load_model(source, dtype="bfloat16")
    save_model(model, tmp_path / "new", source=source, max_shard_bytes=50_000)
    assert files.headers(tmp_path / "new") == files.headers(source)
    for name, value in known_tensors().items():
        assert files.read_tensor(tmp_path / "new", name) == value.tobytes()
    for name, text in COMPANIONS.items():
        assert (tmp_path / "new" / name).read_text() == text
    assert (tmp_path / "new" / "dspark" / "model.safetensors").read_bytes() == b"as it is"
    assert not (tmp_path / "new" / "modeling_custom.py").exists()
    assert_identical(load_model(tmp_path / "new", dtype="bfloat16")[0], model)


def test_the_config_keeps_what_the_source_says_beside_ours(tmp_path):
    tensors, _ = files.released(CONFIG, files.mxfp8, files.compressed_tensors)
    source = a_source(tmp_path / "source", tensors)
    save_model(load(source), tmp_path / "new", source=source, format="mxfp8")
    root = json.loads((tmp_path / "new" / "config.json").read_text())
    assert root["image_seq_length"] == 576 and root["text_config"]["bos_token_id"] == 4
    assert "auto_map" not in root
    assert "moe_quant_algo" not in root["quantization_config"]
    assert root["quantization_config"]["quant_method"] == "mxfp8"
    moe = "language_model.model.layers.1.block_sparse_moe.gate"
    assert moe in root["quantization_config"]["ignored_layers"]


def test_the_config_says_how_the_weights_are_stored(tmp_path):
    caches = replace(tiny().quantization, projections="bf16", experts="bf16")
    config = replace(CONFIG, quantization=caches)
    model = random_model(config)
    for name, stored in {"m3.1": ("mxfp8", "nvfp4"), "mxfp8": ("mxfp8", "mxfp8")}.items():
        save_model(model, tmp_path / name, format=name)
        quantization = read_config(tmp_path / name).quantization
        assert (quantization.projections, quantization.experts) == stored
        assert (quantization.kv_cache, quantization.index_cache) == ("nvfp4", "nvfp4")
    save_model(model, tmp_path / "bf16", format="bf16")
    root = json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert "quantization_config" not in root  # transformers would want to know its method
    assert root["torch_dtype"] == "bfloat16"


def test_a_failure_leaves_nothing_behind(model, tmp_path):
    def fail(name: str, nbytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_model(model, tmp_path / "new", progress=fail)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_empty_is_left_alone(model, tmp_path):
    (tmp_path / "here").mkdir()
    save_model(model, tmp_path / "here")  # an empty one is taken
    with pytest.raises(ValueError, match="is there already and is not an empty folder"):
        save_model(model, tmp_path / "here", format="bf16")
    assert_same(load(tmp_path / "here"), values_of(model))


def test_an_unknown_format_is_refused(model, tmp_path):
    with pytest.raises(ValueError, match="format 'int4' is not one of m3.1, mxfp8, bf16"):
        save_model(model, tmp_path / "new", format="int4")
    assert not (tmp_path / "new").exists()
