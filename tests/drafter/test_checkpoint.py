"""The drafter's folder: the released table, what is refused, and there and back."""

import json
from dataclasses import replace

import numpy as np
import pytest

from configs.parallel import ParallelConfig
from configs.presets import m3_1_flash
from minimax_jax import names
from minimax_jax.checkpoint import parameters_of
from minimax_jax.checkpoint.folder import read_config
from minimax_jax.checkpoint.tensor_file import DTYPES, CheckpointError
from minimax_jax.checkpoint.write import Kind, specs
from minimax_jax.inspect import inspect_checkpoint
from minimax_jax.quantize import dequantize_model, form_of
from minimax_jax.speculative.checkpoint import abstract_drafter, load_drafter, save_drafter
from sharding.mesh import make_mesh
from tests.checkpoint import files as target_files
from tests.checkpoint.files import assert_identical, headers, plain, read_tensor
from tests.drafter import files
from tests.drafter.files import D
from tests.drafter.models import drafted, random_drafter

CONFIG = drafted(projections="mxfp8")
A_PROJECTION = f"{D}layers.1.decoder_layer.self_attn.q_proj.weight"


def loaded(folder, dtype="float32", **options):
    return load_drafter(folder, read_config(folder), dtype=dtype, **options)[0]


def values_of(drafter):
    return {
        path: np.asarray(p.get_value(), np.float32)
        for path, p in parameters_of(dequantize_model(drafter)).items()
    }


def test_the_full_drafter_is_the_released_table_of_97_tensors():
    config = m3_1_flash()
    ours, parameters = {}, 0
    for path, p in parameters_of(abstract_drafter(config)).items():
        weight, path = p.get_value(), names.DRAFTER + path
        name = names.add_prefix(names.released_place(path).name)
        kind = Kind.of(weight).wanted(path, "m3.1")
        ours |= {s.name: (s.dtype, s.shape) for s in specs(name, tuple(weight.shape), kind)}
        parameters += weight.size
    wanted = {}
    for name, (shape, quantized) in files.table(config).items():
        wanted[name] = DTYPES["F8_E4M3" if quantized else "BF16"], shape
        if quantized:
            wanted[f"{name}_scale_inv"] = DTYPES["U8"], (shape[0], shape[1] // 32)
    assert ours == wanted and len(ours) == 97
    assert wanted[f"{D}fc.weight"][1] == (6144, 30720)
    assert wanted[f"{D}layers.4.decoder_layer.mlp.down_proj.weight_scale_inv"][1] == (6144, 384)
    assert wanted[f"{D}confidence_head.proj.weight"][1] == (1, 6400)
    nbytes = sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in ours.values())
    assert 1.95e9 < parameters < 1.97e9 and 2.29e9 < nbytes < 2.32e9


@pytest.mark.parametrize("quantized", [True, False])
def test_every_value_arrives_at_its_place(quantized, tmp_path):
    config = CONFIG if quantized else drafted()
    tensors, values = files.released(config, quantized=quantized)
    drafter = loaded(files.write(tmp_path / "model", config, tensors))
    found = values_of(drafter)
    assert found.keys() == {files.path_of(name) for name in values}
    for name, value in values.items():
        np.testing.assert_array_equal(found[files.path_of(name)], value, err_msg=name)
    form = form_of(drafter.layers[0].attention.q_proj.weight.get_value())
    assert form == ("mxfp8" if quantized else "plain")


@pytest.mark.parametrize("prefix", ["language_model.model.dspark.", "model.dspark.", "dspark."])
def test_every_known_prefix_is_read(prefix, tmp_path):
    tensors, _ = files.released(CONFIG)
    folder = files.write(tmp_path / "one", CONFIG, tensors)
    renamed = {name.replace(D, prefix): value for name, value in tensors.items()}
    other = files.write(tmp_path / "other", CONFIG, renamed)
    assert_identical(loaded(folder), loaded(other))


def test_what_is_written_is_read_back_bit_for_bit(tmp_path):
    tensors, _ = files.released(CONFIG)
    drafter = loaded(files.write(tmp_path / "source", CONFIG, tensors), dtype="bfloat16")
    save_drafter(drafter, CONFIG, tmp_path / "new")
    assert {n: tuple(shape) for n, (_, shape) in headers(tmp_path / "new" / "dspark").items()} == {
        name: value.shape for name, value in tensors.items()
    }
    for name, value in tensors.items():
        assert read_tensor(tmp_path / "new" / "dspark", name) == value.tobytes(), name
    (tmp_path / "new" / "config.json").write_bytes((tmp_path / "source/config.json").read_bytes())
    assert read_config(tmp_path / "new") == read_config(tmp_path / "source")
    assert_identical(drafter, loaded(tmp_path / "new", dtype="bfloat16"))


@pytest.mark.parametrize("format", ["m3.1", "mxfp8", "bf16"])
def test_a_trained_drafter_is_written_in_the_released_form(format, tmp_path):
    config = drafted()
    drafter = random_drafter(config)
    save_drafter(drafter, config, tmp_path, format=format)
    kinds = {dtype for dtype, _ in headers(tmp_path / "dspark").values()}
    assert kinds == ({"BF16"} if format == "bf16" else {"BF16", "F8_E4M3", "U8"})
    assert len(headers(tmp_path / "dspark")) == len(parameters_of(drafter)) + (
        0 if format == "bf16" else 14
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    again = values_of(loaded(tmp_path))
    for path, value in values_of(drafter).items():
        error = np.linalg.norm(again[path] - value) / np.linalg.norm(value)
        assert error < 0.05, (path, error)


def test_a_drafter_without_confidence_head_has_two_tensors_less(tmp_path):
    config = drafted(projections="mxfp8", confidence_head=False)
    tensors, _ = files.released(config)
    tensors = {name: value for name, value in tensors.items() if "confidence" not in name}
    folder = files.write(tmp_path / "model", config, tensors)
    assert loaded(folder).confidence is None
    with pytest.raises(CheckpointError, match="confidence_head.proj.weight .* is neither in the"):
        folder = files.write(tmp_path / "other", CONFIG, tensors)
        loaded(folder)


@pytest.mark.devices(2)
def test_a_mesh_gets_its_shards(tmp_path):
    folder = files.write(tmp_path / "model", CONFIG, files.released(CONFIG)[0])
    mesh = make_mesh(ParallelConfig(tp=2))
    whole, sharded = loaded(folder), loaded(folder, mesh=mesh)
    assert_identical(whole, sharded)
    codes = sharded.layers[0].attention.q_proj.weight.get_value().codes
    assert codes.sharding.shard_shape(codes.shape)[0] == codes.shape[0] // 2
    w1 = sharded.markov.w1.get_value()
    assert w1.sharding.is_fully_replicated


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda t: t.pop(f"{D}hidden_norm.weight"), "hidden_norm.weight .* is neither in the"),
        (lambda t: t.pop(A_PROJECTION), "q_proj.weight_scale_inv is there, but dspark.layers.1"),
        (lambda t: t.pop(f"{A_PROJECTION}_scale_inv"), "q_proj.weight_scale_inv is neither in"),
        (lambda t: t.update({f"{D}d2t": t[f"{D}fc.weight"]}), "d2t .* is no tensor of this"),
        (lambda t: t.update({"lm_head.weight": t[f"{D}fc.weight"]}), "lm_head.weight .* is no"),
        (lambda t: t.update({f"{D}mtp.x": t[f"{D}fc.weight"]}), "mtp.x .* is no tensor of this"),
        (
            lambda t: t.update({f"{D}fc.weight": t[f"{D}fc.weight"][:, :64]}),
            r"fc.weight is BF16 \[64, 64\], expected \[64, 128\]",
        ),
        (
            lambda t: t.update({A_PROJECTION: t[f"{D}fc.weight"][:, :64]}),
            "is BF16 .*, but has scale_inv beside it",
        ),
        (
            lambda t: t.update({"dspark.fc.weight": t[f"{D}fc.weight"]}),
            "are the same parameter",
        ),
    ],
)
def test_damage_is_refused_with_a_sentence(damage, sentence, tmp_path):
    tensors, _ = files.released(CONFIG)
    damage(tensors)
    folder = files.write(tmp_path / "model", CONFIG, tensors)
    with pytest.raises(CheckpointError, match=sentence):
        loaded(folder)


def test_the_format_has_to_be_the_one_that_its_config_says(tmp_path):
    bf16, quantized = (files.released(CONFIG, quantized=q)[0] for q in (False, True))
    folder = files.write(tmp_path / "bf16", CONFIG, bf16)
    with pytest.raises(CheckpointError, match="stored as plain, but the .* config says mxfp8"):
        loaded(folder)
    folder = files.write(tmp_path / "quantized", drafted(), quantized)
    with pytest.raises(CheckpointError, match="stored as mxfp8, but the .* config says plain"):
        loaded(folder)


def test_what_its_config_excludes_may_be_plain(tmp_path):
    tensors, _ = files.released(CONFIG)
    name = A_PROJECTION.removesuffix(".weight")
    tensors |= plain(A_PROJECTION, (256, 64), np.random.default_rng(0))[0]
    del tensors[f"{A_PROJECTION}_scale_inv"]
    root = CONFIG.drafter_to_hf()
    root["quantization_config"]["ignored_layers"] = [name]
    drafter = loaded(files.write(tmp_path / "model", CONFIG, tensors, root))
    assert form_of(drafter.layers[1].attention.q_proj.weight.get_value()) == "plain"


def test_a_target_without_a_drafter_is_told_so(tmp_path):
    folder = files.write(tmp_path / "model", CONFIG, files.released(CONFIG)[0])
    config = replace(CONFIG, drafter=None)
    with pytest.raises(ValueError, match="the model has no drafter"):
        load_drafter(folder, config, dtype="float32")


def test_a_mixture_of_formats_is_not_written(tmp_path):
    drafter, config = random_drafter(drafted()), drafted()
    tensors, _ = files.released(CONFIG)
    other = loaded(files.write(tmp_path / "model", CONFIG, tensors))
    mixed = other.layers[0].mlp.up_proj.weight.get_value()
    drafter.layers[0].mlp.up_proj.weight.set_value(mixed)
    with pytest.raises(ValueError, match="projections are mxfp8 and plain"):
        save_drafter(drafter, config, tmp_path / "new")
    assert not (tmp_path / "new" / "dspark").exists()


def test_inspect_tells_what_is_wrong_with_the_drafter(tmp_path):
    tensors, _ = files.released(CONFIG)
    del tensors[f"{D}hidden_norm.weight"]
    folder = files.write(tmp_path / "model", CONFIG, tensors)
    target_files.write(folder, CONFIG, target_files.released(CONFIG)[0])
    problems = inspect_checkpoint(folder).problems
    assert len(problems) == 1 and problems[0].startswith("dspark/language_model.model.dspark.hid")
