"""Experts in the order of a GPU's kernels, as a machine with one would load them: shards, values
and saved bytes are those of the checkpoint's order.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.parallel import ParallelConfig
from configs.presets import tiny
from minimax_jax import quantize
from minimax_jax.checkpoint import load_model, parameters_of, save_model
from minimax_jax.moe import MoE
from pallas_kernels.layouts.nvfp4 import NVFP4Tensor
from pallas_kernels.layouts.nvfp4_pages import NVFP4Pages
from sharding.mesh import make_mesh
from sharding.rules import SERVE, with_parallel
from tests.checkpoint import files
from tests.checkpoint.files import load
from tests.numerics import assert_close

pytestmark = pytest.mark.devices(8)

CONFIG = replace(
    tiny(),
    sparse_layers=(True,) * 2,
    moe_layers=(False, True),
    moe=replace(tiny().moe, expert_dim=256),  # two pages along each axis of two devices
)
EXPERTS = "layers.1.mlp.experts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tensors, _ = files.released(CONFIG, files.mxfp8, files.compressed_tensors)
    return files.write(tmp_path_factory.mktemp("source"), CONFIG, tensors)


@pytest.fixture(scope="module")
def plain(folder):
    """Loaded here as it is: in the checkpoint's order."""
    model = load(folder)
    assert isinstance(_expert(model, "w1"), NVFP4Tensor)
    return model


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Loading believes that the kernels run here; the ops know better."""
    monkeypatch.setattr(quantize, "refuse_device", lambda: None)


def _loaded(folder, parallel):
    mesh, rules = make_mesh(parallel), with_parallel(SERVE, parallel)
    return load_model(folder, dtype=jnp.float32, mesh=mesh, rules=rules)[0], mesh, rules


def _expert(model, name):
    return parameters_of(model)[f"{EXPERTS}.{name}.weight"].get_value()


def _bytes(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("text", [pytest.param("tp1", marks=pytest.mark.slow), "tp2", "dp2,tp2,ep"])
def test_pages_are_sharded_computed_with_and_saved_as_the_checkpoint(folder, plain, text, tmp_path):
    model, mesh, rules = _loaded(folder, ParallelConfig.parse(text))
    for name in ("w1", "w2", "w3"):
        weight = _expert(model, name)
        assert isinstance(weight, NVFP4Pages)
        shard = weight.pages.addressable_shards[0].data
        assert shard.nbytes * mesh.size == weight.pages.nbytes
    x = jax.random.normal(jax.random.key(0), (4, 6, CONFIG.hidden_size))
    expected = jax.jit(_experts(plain))(*_routed(x))
    with jax.set_mesh(mesh):
        found = jax.jit(lambda *rows: _experts(model)(*rows, rules=rules))(*_routed(x))
    total = lambda y: np.asarray(y).sum(0)  # noqa: E731
    assert_close(total(found), total(expected), "f32")
    save_model(model, tmp_path / "pages")
    save_model(plain, tmp_path / "plain")
    assert _bytes(tmp_path / "pages") == _bytes(tmp_path / "plain")


def _experts(model):
    mlp = model.layers[1].mlp
    assert isinstance(mlp, MoE)
    return mlp.experts


def _routed(x):
    shape, num = x.shape[:-1], CONFIG.moe.num_experts
    keys = jax.random.split(jax.random.key(1))
    ids = jnp.argsort(jax.random.uniform(keys[0], (*shape, num)))[..., :4]
    return x, ids.astype(jnp.int32), jax.random.uniform(keys[1], (*shape, 4))


@pytest.mark.usefixtures("on_a_gpu")
def test_experts_whose_shards_would_cut_a_page_keep_the_checkpoints_order(folder):
    model, _, _ = _loaded(folder, ParallelConfig.parse("tp4"))
    assert isinstance(_expert(model, "w2"), NVFP4Tensor)  # 64 columns a device
    assert isinstance(_expert(model, "w1"), NVFP4Pages)


@pytest.mark.usefixtures("on_a_gpu")
def test_other_formats_are_made_of_pages_as_of_tensors(folder, plain):
    plain = quantize.dequantize_model(plain)
    pages = quantize.dequantize_model(_loaded(folder, ParallelConfig.parse("tp1"))[0])
    for one, other in zip(jax.tree.leaves(pages), jax.tree.leaves(plain), strict=True):
        assert np.array_equal(one, other)
