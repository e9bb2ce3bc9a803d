"""`minimax-jax bench` and the random model that it runs, at a small size on the CPU."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.parallel import ParallelConfig
from configs.presets import m3_1_flash, tiny
from minimax_jax.__main__ import main
from minimax_jax.bench.command import shortened
from minimax_jax.bench.layer import of_layers
from minimax_jax.bench.prepared import drafted_config, layout_of
from minimax_jax.bench.speculation import draft_bytes
from minimax_jax.bench.work import decode_bytes, layer_bytes, page_bytes, prefill_flops
from minimax_jax.cache import pool_layout
from minimax_jax.moe import MoE
from minimax_jax.random_model import random_drafter, random_model
from pallas_kernels.device_timeline import Kernel, Timeline
from pallas_kernels.layouts.pool import CacheFormats
from pallas_kernels.scaled_matmul.reference import expand
from sharding import SERVE, make_mesh, with_parallel

FORMATS = CacheFormats(kv="nvfp4", index="nvfp4")


@pytest.mark.slow  # 15 s, with the next one: every shape's bits are a program
def test_random_matrices_keep_the_size_of_what_they_multiply():
    model = random_model(shortened(tiny(), 2), jnp.bfloat16)
    attention, moe = model.layers[1].attention, model.layers[1].mlp
    assert isinstance(moe, MoE)
    for weight in (
        attention.q_proj.weight,
        attention.o_proj.weight,
        moe.experts.w2.weight,
        model.head.weight,
    ):
        values = np.asarray(expand(weight.get_value(), jnp.float32))
        assert np.sqrt(np.mean(values**2) * values.shape[-1]) == pytest.approx(1, rel=0.3)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_layer_whatever_the_depth():
    short, long = (random_model(shortened(tiny(), n), jnp.bfloat16, seed=3) for n in (1, 2))
    pair = zip(jax.tree.leaves(short.layers[0]), jax.tree.leaves(long.layers[0]), strict=True)
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in pair)


def test_bytes_of_a_full_size_decode_step():
    """One layer at 8,192 tokens, by hand: MXFP8 is 33/32 byte a weight, NVFP4 9/16."""
    config = replace(shortened(m3_1_flash(), 1), moe_layers=(True,))
    model = jax.eval_shape(lambda: random_model(config, jnp.bfloat16))
    layout = pool_layout(config, FORMATS)
    D, expert, head = 6144, 3 * 6144 * 3072, 200_064 * 6144 * 2
    projections = (8192 + 2 * 512 + 512 + 128 + 8192) * D + expert
    router, norms = 128 * D * 4 + 128 * 4, 2 * (3 * D + 4 * 128)
    pages = 64 * 9216 + 16 * 4 * 2 * 9216
    assert page_bytes(model, layout, 8192) == pages
    expected = projections * 33 // 32 + router + norms + head + 2 * D + pages
    found = decode_bytes(model, layout, 1, 8192, 4)
    assert found == expected + 4 * (expert * 9 // 16 + 3 * 4)


def test_bytes_of_one_layer_are_the_steps_without_head_and_last_norm():
    config = of_layers(shortened(m3_1_flash(), 1), 1)
    model = jax.eval_shape(lambda: random_model(config, jnp.bfloat16))
    layout = pool_layout(of_layers(config, 3), FORMATS)
    found = layer_bytes(model.layers[0], model, layout, 32, 8192, 80)
    whole = decode_bytes(model, pool_layout(config, FORMATS), 32, 8192, 80)
    head_and_norm, row = 200_064 * 6144 * 2 + 2 * 6144, 2 * 6144
    three = page_bytes(model, layout, 8192)
    assert three == 3 * page_bytes(model, pool_layout(config, FORMATS), 8192)
    assert found == whole - head_and_norm + 32 * row  # a row more: it is written, too


def test_bytes_of_a_full_size_proposal():
    """8,192 tokens, of which the window has 4,096: 32 blocks of five layers' FP8 keys and values.
    The head is the target's.
    """
    config = drafted_config("m3_1_flash", shortened(m3_1_flash(), None), 3.2)
    model = jax.eval_shape(lambda: random_model(shortened(config, 4), jnp.bfloat16))
    drafter = jax.eval_shape(lambda: random_drafter(config, jnp.bfloat16))
    D, V = 6144, 200_064
    layer = ((2 * 8192 + 2 * 512) * D + 3 * D * 12288) * 33 // 32 + 2 * (2 * D + 2 * 128)
    heads = 2 * (5 * D * D + 2 * 256 * V + V * D) + 2 * (D + 256 + 1) + 2 * 2 * D
    with jax.set_mesh(make_mesh(ParallelConfig())):
        found = draft_bytes(model, drafter, layout_of(config, "bfloat16"), 3, 8192)
    assert found == 5 * layer + heads + 3 * 32 * 5 * 2 * 4 * 128 * 128


def test_flops_of_a_prompt():
    """One layer, 4,096 tokens, of which a token sees 2,048 at most: the mean of all is 2,048."""
    config = replace(shortened(m3_1_flash(), 1), moe_layers=(True,))
    D, T = 6144, 4096
    weights = D * (2 * 8192 + 2 * 512 + 5 * 128 + 128) + 3 * D * 5 * 3072
    attention = 2 * 4 * 128 * 2048 + 4 * 8192 * 2048
    assert prefill_flops(config, T) == T * (2 * weights + attention) + 2 * D * 200_064


def test_a_timeline_counts_a_runs_launches_and_its_pauses():
    starts = ((0.0, "a"), (10.0, "b"), (25.0, "a"), (35.0, "b"))
    kernels = [Kernel(name=name, start_us=at, us=5.0) for at, name in starts]
    timeline = Timeline(kernels=tuple(kernels), runs=2)
    assert (timeline.launches, timeline.busy_us) == (2, 10)
    assert timeline.gaps[0] == (10.0, "b", "a")
    assert timeline.by_name == [("a", 5.0, 1.0), ("b", 5.0, 1.0)]


@pytest.mark.slow  # 40 s: three programs are compiled
def test_the_command_prints_and_writes_its_figures(tmp_path, capsys):
    asked = "bench --preset tiny --layers 1 --batch 1 --context 64 --prefill 64".split()
    asked += ["--layer", "2x64", "--json"]
    main([*asked, str(tmp_path / "out.json")])
    printed = capsys.readouterr().out
    assert "decode 1 x 64" in printed and "tokens/s, compiled in" in printed
    rows = json.loads((tmp_path / "out.json").read_text("utf-8"))["rows"]
    assert [row["name"] for row in rows] == ["layer 2 x 64", "decode 1 x 64", "prefill 64"]
    assert all(row["tokens_a_second"] > 0 for row in rows)
    assert all(0 < row["first_call_s"] < row["row_s"] for row in rows)


@pytest.mark.slow  # 40 s
@pytest.mark.devices(8)
def test_a_mesh_is_measured_with_speculation_its_sums_and_its_choices(tmp_path, capsys):
    asked = "bench --preset tiny --layers 1 --parallel tp2,dcp2 --batch 2 --context 64 --prefill"
    asked += " --speculative 3.2 --sum 2 --choice 1x640 --json"
    main([*asked.split(), str(tmp_path / "out.json")])
    assert "weights made in" in capsys.readouterr().out
    report = json.loads((tmp_path / "out.json").read_text("utf-8"))
    rows = {row["name"]: row for row in report["rows"]}
    speculated = rows["speculate 2 x 64, 3.2 tokens a step assumed"]
    assert speculated["tokens_a_second"] == pytest.approx(6.4 / speculated["ms"] * 1e3)
    assert {"sum 2 x 128 over 2", "choice 1 x 640"} < set(rows)


@pytest.mark.slow  # 25 s
@pytest.mark.devices(8)
def test_a_mesh_has_the_random_weights_of_one_device():
    config, parallel = shortened(tiny(), 2), ParallelConfig(dp=2, tp=2, ep=4)
    rules = with_parallel(SERVE, parallel)
    alone = random_model(config, jnp.bfloat16)
    spread = random_model(config, jnp.bfloat16, mesh=make_mesh(parallel), rules=rules)
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(spread), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--layers 9", "layers=9, but the model has 5"),
        ("--steps 0", "steps=0"),
        ("--layer 32", "'32' is no batch x context"),
        ("--speculative 8.5", "speculative=8.5, but a step commits 1 to 8 tokens"),
        ("--preset m3 --speculative 2", "m3 has no drafter"),
        ("--preset m3_1_flash --layers 3 --speculative 2", "taps layers (3, 17, 31, 45, 59), but"),
    ],
)
def test_a_mistake_is_one_sentence(flags, said, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--preset", "tiny", *flags.split()])
    assert said in capsys.readouterr().err
