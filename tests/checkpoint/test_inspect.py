"""What `inspect` tells, from headers alone."""

import io

import jax
import numpy as np
import pytest
from rich.console import Console

from minimax_jax.checkpoint import abstract_model, load_model
from minimax_jax.inspect import inspect_checkpoint, print_inspection
from tests.checkpoint import files
from tests.checkpoint.test_save import a_source

CONFIG = files.two_layers()


def parameters(config) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_model(config, "float32")))


@pytest.mark.parametrize("experts", [files.plain, files.compressed_tensors, files.modelopt])
def test_formats_bytes_and_parameters_are_counted(experts, tmp_path):
    tensors, _ = files.released(CONFIG, files.mxfp8, experts)
    found = inspect_checkpoint(files.write(tmp_path, CONFIG, tensors, shards=2))
    assert found.parameters == parameters(CONFIG)
    assert found.nbytes == sum(value.nbytes for value in tensors.values())
    assert sum(row.tensors for row in found.rows) == len(tensors)
    assert found.files == 2 and found.problems == ()
    forms = {row.part: row.form for row in found.rows}
    expert_form = "bf16" if experts is files.plain else "nvfp4"
    assert forms["routed experts"] == expert_form and forms["index projections"] == "mxfp8"
    assert forms["router"] == "f32" and forms["norms"] == "bf16"


def test_known_and_unknown_tensors_have_rows_of_their_own(tmp_path):
    tensors, _ = files.released(CONFIG, files.mxfp8, files.compressed_tensors)
    tensors["language_model.model.surprise"] = np.ones(3, np.float32)
    source = a_source(tmp_path / "source", tensors)
    found = inspect_checkpoint(source)
    rows = {row.part: row for row in found.rows}
    vision = [row for row in found.rows if row.part == "vision"]
    assert {row.form: row.tensors for row in vision} == {"f32": 1, "bf16": 1}
    assert not any(row.loaded for row in vision)
    assert rows["mtp"].tensors == rows["activation scale"].tensors == 1
    assert rows["unknown"].parameters == 3
    assert [p for p in found.problems if "surprise (F32 [3]) is no tensor of this model" in p]


def test_what_a_load_would_raise_is_listed(tmp_path):
    tensors, _ = files.released(CONFIG)
    for name in list(tensors)[:30]:
        del tensors[name]
    folder = files.write(tmp_path, CONFIG, tensors)
    with pytest.raises(ValueError) as caught:
        load_model(folder, dtype="float32")
    found = inspect_checkpoint(folder)
    assert found.problems == caught.value.problems
    out = io.StringIO()
    print_inspection(found, Console(file=out, width=200))
    assert out.getvalue().count("problem: ") == 20 and "more problems" in out.getvalue()


def test_the_table_is_readable(tmp_path):
    tensors, _ = files.released(CONFIG, files.mxfp8, files.compressed_tensors)
    out = io.StringIO()
    print_inspection(
        inspect_checkpoint(files.write(tmp_path, CONFIG, tensors)), Console(file=out, width=120)
    )
    text = out.getvalue()
    assert "routed experts" in text and "nvfp4" in text and f"{parameters(CONFIG):,}" in text
    assert "2 layers: 1 with sparse attention, 1 with experts" in text


def test_nothing_is_read_but_headers(tmp_path, monkeypatch):
    folder = files.write(tmp_path, CONFIG, files.released(CONFIG)[0])
    fail = lambda *_, **__: pytest.fail("a tensor was read")  # noqa: E731
    monkeypatch.setattr("minimax_jax.checkpoint.tensor_file.Entry.read_into", fail)
    inspect_checkpoint(folder)
