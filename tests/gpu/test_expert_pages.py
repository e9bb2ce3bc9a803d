"""Experts in the kernels' order: loaded, used, saved again bit for bit."""

from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx

from configs.presets import tiny
from minimax_jax.checkpoint import load_model, parameters_of, save_model
from minimax_jax.model import Model
from pallas_kernels.layouts.nvfp4_pages import NVFP4Pages

pytestmark = pytest.mark.gpu


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_what_is_loaded_as_pages_is_saved_as_it_was(tmp_path):
    model = Model(tiny(), nnx.Rngs(0), jnp.bfloat16)
    save_model(model, tmp_path / "first", format="m3.1")
    loaded, _ = load_model(tmp_path / "first", dtype=jnp.bfloat16)
    kinds = {type(p.get_value()) for p in parameters_of(loaded).values()}
    assert NVFP4Pages in kinds
    save_model(loaded, tmp_path / "second")
    assert _files(tmp_path / "first") == _files(tmp_path / "second")
