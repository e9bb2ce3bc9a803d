"""Loading onto several devices: each gets its shards, and nothing passes through another (F180)."""

import gc
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from configs.parallel import ParallelConfig
from configs.presets import tiny
from minimax_jax.checkpoint import (
    abstract_model,
    load_model,
    parameters_of,
    read_plan,
    tensor_file,
)
from minimax_jax.checkpoint.files import open_files
from minimax_jax.checkpoint.read import parts
from sharding.mesh import make_mesh
from sharding.rules import SERVE, with_parallel
from tests.checkpoint import files
from tests.checkpoint.files import assert_same, load, values_of

pytestmark = pytest.mark.devices(8)

CONFIG = replace(
    tiny(),
    sparse_layers=(True,) * 2,
    moe_layers=(False, True),
    moe=replace(tiny().moe, expert_dim=128),  # four devices get one MXFP8 group each
)
FORMS = {
    "bf16": (files.plain, files.plain),
    "mxfp8": (files.mxfp8, files.mxfp8),
    "m3.1": (files.mxfp8, files.compressed_tensors),
}


def held() -> dict[int, int]:
    """Bytes of live arrays on each device. (Not by way of `shard.data`, which makes new arrays.)"""
    held = {device.id: 0 for device in jax.devices()}
    for array in jax.live_arrays():
        shard = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for device in array.sharding.device_set:
            held[device.id] += shard
    return held


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "parallel",
    [ParallelConfig(tp=2), ParallelConfig(tp=4), ParallelConfig(dp=2, tp=2, ep=4)],
    ids=str,
)
def test_no_device_holds_more_than_its_shards_and_one_tensor(form, parallel, tmp_path):
    folder = files.write(tmp_path, CONFIG, files.released(CONFIG, *FORMS[form])[0])
    expected = values_of(load(folder))
    gc.collect()
    before = held()
    seen: list[dict[int, int]] = []
    model, report = load_model(
        folder,
        dtype="bfloat16",
        mesh=make_mesh(parallel),
        rules=with_parallel(SERVE, parallel),
        progress=lambda *_: seen.append(held()),
    )
    gc.collect()
    after = held()
    used = range(parallel.num_devices)
    for device in jax.devices():
        share = after[device.id] - before[device.id]
        assert (share > 0) == (device.id in used)
        assert max(s[device.id] for s in seen) - before[device.id] <= share + report.largest_bytes
    shares = [after[i] - before[i] for i in used]
    assert max(shares) == min(shares) < 0.75 * report.nbytes
    for path, value in values_of(model).items():
        np.testing.assert_array_equal(value, expected[path], err_msg=path)


def test_shards_lie_where_the_rules_put_them(tmp_path):
    folder = files.write(tmp_path, CONFIG, files.released(CONFIG, *FORMS["m3.1"])[0])
    parallel = ParallelConfig(tp=4)
    parameters = parameters_of(load(folder, mesh=make_mesh(parallel)))
    E, F, D = CONFIG.moe.num_experts, CONFIG.moe.expert_dim, CONFIG.hidden_size

    def local(array: jax.Array) -> tuple[int, ...]:
        return array.addressable_shards[0].data.shape

    w1 = parameters["layers.1.mlp.experts.w1.weight"].get_value()
    assert local(w1.codes) == (E, F // 4, D // 2) and local(w1.scales) == (E, F // 4, D // 16)
    w2 = parameters["layers.1.mlp.experts.w2.weight"].get_value()
    assert local(w2.codes) == (E, D, F // 2 // 4) and local(w2.scales) == (E, D, F // 16 // 4)
    assert local(w2.outer) == (E,)
    k = parameters["layers.1.attention.k_proj.weight"].get_value()
    assert local(k.exponents) == (k.codes.shape[0] // 4, D // 32)
    assert local(parameters["layers.1.mlp.router.weight"].get_value()) == (E, D)


@pytest.mark.parametrize(
    ("text", "changes", "sentence"),
    [
        ("tp8", {"expert_dim": 64}, "layers.1.mlp.experts.w2.weight in nvfp4 cannot be sharded"),
        ("dep4", {"num_experts": 10}, "'experts' of size 10 is not a multiple of its 4 shards"),
    ],
)
def test_uneven_shards_are_refused_before_anything_is_read(text, changes, sentence, tmp_path):
    """F91: 64 expert inputs over 8 devices are 8 each, half a group of 16. F99: 10 experts."""
    config = replace(CONFIG, moe=replace(CONFIG.moe, **changes))
    folder = files.write(tmp_path, config, files.released(config, *FORMS["m3.1"])[0])
    parallel = ParallelConfig.parse(text)
    gc.collect()
    before = held()
    with pytest.raises(ValueError) as caught:
        load(folder, mesh=make_mesh(parallel), rules=with_parallel(SERVE, parallel))
    assert sentence in str(caught.value)
    assert held() == before


def test_host_buffers_stay_below_twice_the_largest_tensor(tmp_path):
    for name, encoders in FORMS.items():
        folder = files.write(tmp_path / name, CONFIG, files.released(CONFIG, *encoders)[0])
        for dtype in ("float32", "bfloat16"):
            _, report = load_model(folder, dtype=dtype, mesh=make_mesh(ParallelConfig(tp=4)))
            assert report.largest_bytes <= report.peak_host_bytes <= 2 * report.largest_bytes


def test_the_same_values_come_out_of_one_device_and_of_eight(tmp_path):
    tensors, values = files.released(CONFIG)
    folder = files.write(tmp_path, CONFIG, tensors)
    model = load(folder, mesh=make_mesh(ParallelConfig(dp=2, tp=4)))
    assert_same(model, files.expected_by_path(CONFIG, values))


@pytest.mark.parametrize("parallel", [ParallelConfig(tp=4), ParallelConfig(dp=4, ep=4)], ids=str)
def test_a_process_reads_once_what_its_devices_keep(parallel, tmp_path):
    folder = files.write(tmp_path, CONFIG, files.released(CONFIG, *FORMS["m3.1"])[0])
    stored = sum(entry.nbytes for entry in open_files(folder).entries.values())
    rules = with_parallel(SERVE, parallel)
    _, report = load_model(folder, dtype="bfloat16", mesh=make_mesh(parallel), rules=rules)
    assert report.read_bytes == stored


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("least", [1, 1 << 20], ids=["pieces of rows", "whole rows"])
def test_any_slices_of_a_leaf_are_those_of_the_whole(form, least, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "LEAST_BYTES", least)
    folder = files.write(tmp_path, CONFIG, files.released(CONFIG, *FORMS[form])[0])
    for leaf in read_plan(folder, abstract_model(CONFIG, "float32")).leaves:
        for part in parts(leaf, "float32"):
            whole = np.empty(part.shape, part.dtype)
            part.read_into(whole, tuple((0, size) for size in part.shape))
            bounds = tuple((size // 3, size - size // 4) for size in part.shape)
            cut = np.empty([end - first for first, end in bounds], part.dtype)
            part.read_into(cut, bounds)
            expected = whole[tuple(slice(*bound) for bound in bounds)]
            np.testing.assert_array_equal(cut.view(np.uint8), bytes_of(expected), leaf.path)


def bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


MEASURE = """
import sys
import jax
from minimax_jax.checkpoint import load_model

def status(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

load_model(sys.argv[1], dtype="bfloat16")  # what is loaded once and for all, code and threads
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak starts here
model, report = load_model(sys.argv[2], dtype="float32")
print(status("VmHWM") - before - report.nbytes, report.largest_bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system keeps no peak")
def test_the_process_grows_by_the_model_and_less_than_twice_its_largest_tensor(tmp_path):
    """Measured from outside: device arrays are host memory here, and they are all that stays."""
    small = files.write(tmp_path / "small", CONFIG, files.released(CONFIG)[0])
    config = replace(CONFIG, vocab_size=65536, hidden_size=512, num_tokens=65536)
    large = files.write(tmp_path / "large", config, files.released(config)[0])
    command = [sys.executable, "-c", MEASURE, str(small), str(large)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    more, largest = map(int, done.stdout.split())
    assert largest == 65536 * 512 * 4
    assert more < 2 * largest, f"{more / largest:.2f} largest tensors"
