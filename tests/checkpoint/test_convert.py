"""From one format to another, matrix by matrix; fewer layers; what comes along."""

import io
import json

import pytest
from rich.console import Console

from configs.presets import tiny_random
from minimax_jax import convert as module
from minimax_jax.checkpoint import load_model, parameters_of, save_model
from minimax_jax.checkpoint.folder import read_config
from minimax_jax.convert import convert, plan_conversion
from minimax_jax.quantize import FORMATS
from tests.checkpoint import files
from tests.checkpoint.files import assert_identical, load, values_of
from tests.checkpoint.test_load import fused
from tests.checkpoint.test_save import COMPANIONS, a_source, known_tensors

CONFIG = files.two_layers()
QUIET = {"console": Console(file=io.StringIO())}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("experts", [files.plain, files.compressed_tensors, files.modelopt])
def test_convert_writes_what_load_and_save_write(name, experts, tmp_path):
    projections = files.plain if experts is files.plain else files.mxfp8
    tensors, _ = files.released(CONFIG, projections, experts)
    source = files.write(tmp_path / "source", CONFIG, tensors, shards=2)
    save_model(load(source), tmp_path / "saved", format=name, source=source)
    convert(source, tmp_path / "converted", format=name, **QUIET)
    saved, converted = tmp_path / "saved", tmp_path / "converted"
    assert files.headers(saved) == files.headers(converted)
    assert_identical(load(saved), load(converted))
    assert json.loads((saved / "config.json").read_text()) == json.loads(
        (converted / "config.json").read_text()
    )


def test_what_has_the_form_already_keeps_its_bits(tmp_path):
    tensors, _ = files.released(CONFIG, files.mxfp8, files.compressed_tensors)
    source = files.write(tmp_path / "source", CONFIG, tensors)
    convert(source, tmp_path / "new", format="m3.1", **QUIET)
    for name in tensors:
        assert files.read_tensor(tmp_path / "new", name) == tensors[name].tobytes()


def test_what_transformers_saved_is_converted_too(tmp_path):
    tensors, _ = files.released(CONFIG)
    files.write(tmp_path / "released", CONFIG, tensors)
    files.write(tmp_path / "fused", CONFIG, fused(tensors))
    for name in ("released", "fused"):
        convert(tmp_path / name, tmp_path / f"{name} new", format="m3.1", **QUIET)
    one, other = (load(tmp_path / f"{name} new") for name in ("released", "fused"))
    assert_identical(one, other)


def test_a_cut_renumbers_layers_and_the_lists_of_the_config(tmp_path):
    config = tiny_random()
    tensors, _ = files.released(config)
    kept_scale = "language_model.model.layers.3.block_sparse_moe.experts.1.w2.input_global_scale"
    lost_scale = kept_scale.replace("layers.3", "layers.1")
    extra = {name: files.E2M1 for name in (kept_scale, lost_scale)}
    source = files.write(tmp_path / "source", config, tensors | extra)
    convert(source, tmp_path / "new", format="bf16", layers=[0, 3], **QUIET)
    cut = read_config(tmp_path / "new")
    assert (cut.num_layers, cut.sparse_layers, cut.moe_layers) == (2, (0, 1), (0, 1))
    text = json.loads((tmp_path / "new" / "config.json").read_text())["text_config"]
    assert text["sparse_attention_config"]["sparse_disable_index_value"] == [0, 1]
    names = files.headers(tmp_path / "new")
    assert kept_scale.replace("layers.3", "layers.1") in names
    assert len([name for name in names if name.endswith("input_global_scale")]) == 1
    whole = load_model(source, dtype="bfloat16")[0]
    small = load_model(tmp_path / "new", dtype="bfloat16")[0]
    whole_values, small_values = values_of(whole), values_of(small)
    for path, value in small_values.items():
        assert (value == whole_values[path.replace("layers.1.", "layers.3.")]).all(), path


def test_a_cut_leaves_the_drafter_behind_and_a_whole_copy_takes_it(tmp_path):
    tensors, _ = files.released(CONFIG, files.mxfp8, files.compressed_tensors)
    tensors["language_model.model.dspark.fc.weight"] = files.E2M1
    source = a_source(tmp_path / "source", tensors)
    convert(source, tmp_path / "whole", format="m3.1", **QUIET)
    convert(source, tmp_path / "cut", format="m3.1", layers=[1], **QUIET)
    assert (tmp_path / "whole" / "dspark" / "model.safetensors").read_bytes() == b"as it is"
    assert not (tmp_path / "cut" / "dspark").exists()
    for folder in ("whole", "cut"):
        assert all((tmp_path / folder / name).is_file() for name in COMPANIONS)
        for name, value in known_tensors().items():
            name = name.replace("layers.1.", "layers.0.") if folder == "cut" else name
            name = name.replace("mtp.layers.1", "mtp.layers.0")
            assert files.read_tensor(tmp_path / folder, name) == value.tobytes()
    assert any(".dspark." in name for name in files.headers(tmp_path / "whole"))
    assert not any(".dspark." in name for name in files.headers(tmp_path / "cut"))
    assert read_config(tmp_path / "cut").sparse_layers == (True,)


@pytest.mark.parametrize("layers", [[0, 2], [-1], [1, 1], []])
def test_layers_that_are_not_there_are_refused(layers, tmp_path):
    source = files.write(tmp_path / "source", CONFIG, files.released(CONFIG)[0])
    with pytest.raises(ValueError, match=r"are not different layers of 0..1"):
        convert(source, tmp_path / "new", format="bf16", layers=layers, **QUIET)
    assert not (tmp_path / "new").exists()


def test_one_matrix_is_in_memory_at_a_time(tmp_path, monkeypatch):
    source = files.write(tmp_path / "source", CONFIG, files.released(CONFIG)[0])
    sizes = []
    read = module.host_weight
    monkeypatch.setattr(module, "host_weight", lambda leaf: sizes.append(leaf.shape) or read(leaf))
    conversion = plan_conversion(source, format="m3.1")
    assert sizes == []  # nothing is read before it is written
    conversion.write(tmp_path / "new")
    experts = parameters_of(load(source))["layers.1.mlp.experts.w1.weight"].get_value().shape
    assert experts not in sizes and sizes.count(experts[1:]) >= 2 * experts[0]


def test_the_bar_reaches_its_end(tmp_path):
    source = files.write(tmp_path / "source", CONFIG, files.released(CONFIG)[0])
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    convert(source, tmp_path / "new", format="mxfp8", console=console)
    assert "mxfp8" in out.getvalue() and "0:00:00" in out.getvalue()


def test_a_damaged_source_and_a_full_folder_are_refused(tmp_path):
    source = files.write(tmp_path / "source", CONFIG, files.released(CONFIG)[0])
    with pytest.raises(ValueError, match="is not an empty folder"):
        convert(source, source, format="bf16", **QUIET)
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="found"):
        convert(source, tmp_path / "new", format="bf16", **QUIET)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]
