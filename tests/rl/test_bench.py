"""`minimax-train bench`: what it counts, what it refuses, and its programs on a Hopper GPU."""

import json
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.presets import m3_1_flash, tiny
from configs.rl import GRPOConfig, m3_1_flash_dapo_lora32
from minimax_jax.bench.command import shortened
from minimax_jax.bench.layer import of_layers
from minimax_jax.bench.work import prefill_flops
from minimax_jax.cache import formats_of
from minimax_jax.loaded import LoadedModel
from minimax_jax.random_model import random_model
from rl.__main__ import main
from rl.adapters import new_adapter
from rl.bench.answers import Answers
from rl.bench.update import Packed
from rl.bench.work import distinct_experts, update_flops
from rl.grpo_step import Program, accumulate
from rl.rollouts import Rollout

REFERENCES = {  # what a GPU runs without a kernel of its own, once or more
    "index keys are not NVFP4 pages",
    "weights are not NVFP4 pages",
}


def rollout(choices) -> Rollout:
    """A prompt of two tokens and an answer of three; the last token is not fed."""
    return Rollout(
        prompt=(1, 2),
        tokens=(3, 4, 5),
        logprobs=np.zeros(3, np.float32),
        finish="length",
        version=0,
        choices=np.array(choices, np.uint8),
    )


def test_experts_that_an_answer_meets_are_counted_by_step_and_layer():
    """Two layers, two experts a token; the prompt's are left out."""
    one = rollout([[[9, 9], [9, 9]], [[9, 9], [9, 9]], [[0, 1], [4, 5]], [[0, 1], [2, 3]]])
    two = rollout([[[8, 8], [8, 8]], [[8, 8], [8, 8]], [[1, 2], [4, 5]], [[3, 4], [6, 7]]])
    assert distinct_experts([one, two]) == [3 + 2, 4 + 4, 4 + 4]


def test_an_update_beside_frozen_weights_is_two_passes_with_the_head_at_every_place():
    config = tiny()
    once = prefill_flops(config, 128) + 127 * 2 * 128 * 512
    assert update_flops(config, 128, 3, "lora") == 2 * 3 * once
    assert update_flops(config, 128, 3, "full") == 3 * 3 * once


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        (Answers(rows=24, prompt=4, answer=4), "24 answers are no groups of samples=16"),
        (Packed(places=64, prompt=60, answer=8), "a pack of 64 places .* holds 68 tokens"),
        (Packed(places=72, prompt=60, answer=8), "no whole number of blocks of 16"),
    ],
)
def test_a_case_that_cannot_be_run_is_refused(case, sentence):
    with pytest.raises(ValueError, match=sentence):
        case.check(GRPOConfig(), 16)


def test_more_tokens_than_the_context_are_refused_before_weights_are_made(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--prompt", "2000", "--answer", "64"])
    assert "2000 and an answer of 64 tokens are more than the context of 2048" in (
        capsys.readouterr().err
    )


@pytest.mark.slow  # 40 s
def test_rollout_and_update_of_the_small_model_are_measured(tmp_path, capsys):
    path = tmp_path / "bench.json"
    sizes = ["--layers", "1", "--rollout", "8", "--train", "64", "--prompt", "20", "--answer", "12"]
    main(["bench", "samples=4", *sizes, "--split", "--json", str(path)])
    told = capsys.readouterr().out
    report = json.loads(path.read_text())
    answers, update = report["rows"]
    assert answers["name"] == "rollout 8 x (20 + 12)" and answers["bytes"] > 0
    assert update["name"] == "update 2 x (20 + 12) in 64" and update["flops"] > 0
    assert update["parts_ms"].keys() == {"optimizer", "forward", "backward"}
    for row in report["rows"]:
        assert f"{row['name']}: {row['ms']:.1f} ms" in told
    seconds = answers["ms"] / 1e3
    assert answers["tokens_a_second"] == pytest.approx(8 * 12 / seconds)


@pytest.mark.slow  # 8 s
def test_the_update_at_full_width_lowers_for_a_gpu_with_the_kernels_of_the_experts(hopper):
    """One layer beside NVFP4 pages, with an adapter on all: 4,096 tokens."""
    config = of_layers(shortened(m3_1_flash(), 1), 1)
    run = m3_1_flash_dapo_lora32()
    model = jax.eval_shape(lambda: random_model(config, jnp.bfloat16))
    make = lambda: new_adapter(config, run.expert_lora, run.rank, jax.random.key(0))  # noqa: E731
    parameters = jax.eval_shape(make)
    loaded = LoadedModel(model=model, formats=formats_of(config, "bf16"), folder=Path())
    pack, count = Packed(places=4096, prompt=3072, answer=1024).pack(loaded, run)
    program = Program(model=config, layout=loaded.layout, config=run)
    assert count == 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced = accumulate.trace(
            parameters, model, parameters, jax.tree.map(jnp.asarray, pack), program
        )
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") > 3
    told = {str(one.message).partition("mosaic: ")[2] for one in caught}
    assert told == REFERENCES
