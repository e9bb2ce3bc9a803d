"""A drafter's run learns, moves nothing of the target, goes on exactly, and ends in a folder that
loads.
"""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from minimax_jax.quantize import dequantize_model
from minimax_jax.speculative.checkpoint import load_drafter
from rl.__main__ import main
from rl.draft_step import block_sums, capture, new_state, train_step
from rl.run_checkpoints import RunCheckpoints
from rl.run_log import read_log
from rl.train_drafter import DrafterRun, DrafterTrainer, train_drafter
from tests.rl.drafter_toy import target, toy_drafter_run

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of all eight steps, and the target's leaves before it."""
    out, before = tmp_path_factory.mktemp("straight"), leaves(target().model)
    train_drafter(toy_drafter_run(out), QUIET, resume=False)
    return out, before


def leaves(tree) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(tree)]


def assert_same(one, other):
    for a, b in zip(leaves(one), leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def newest_state(run):
    with RunCheckpoints(run.out / "checkpoints", keep=1) as checkpoints:
        return DrafterTrainer(run, QUIET, checkpoints, resume=True).state


def test_eight_steps_are_three_and_five(finished, tmp_path):
    run = toy_drafter_run(tmp_path)
    with RunCheckpoints(run.out / "checkpoints", keep=1) as checkpoints:
        trainer = DrafterTrainer(run, QUIET, checkpoints, resume=False)
        windows = trainer.windows()
        while trainer.step < 3:
            next(windows)
        trainer.save()
    train_drafter(run, QUIET, resume=True)
    straight = newest_state(toy_drafter_run(finished[0]))
    assert straight.step == 8
    assert_same(straight, newest_state(run))
    both = (read_log(out / "train.jsonl") for out in (finished[0], tmp_path))
    measured = [[record["short"] for record in log if "short" in record] for log in both]
    assert len(measured[0]) == 2 and measured[0] == measured[1]


def test_a_wave_that_is_missing_is_made_again_the_same(finished, tmp_path):
    made = sorted((finished[0] / "answers").iterdir())
    assert [path.name for path in made] == [
        "held_out-ledger-0000000.npz",
        "held_out-short-0000000.npz",
        "train-ledger-0000000.npz",
        "train-short-0000000.npz",
        "train-short-0000012.npz",
    ]
    (tmp_path / "answers").mkdir()
    for path in made[:-1]:
        (tmp_path / "answers" / path.name).write_bytes(path.read_bytes())
    run = toy_drafter_run(tmp_path)
    with RunCheckpoints(run.out / "checkpoints", keep=1) as checkpoints:
        trainer = DrafterTrainer(run, QUIET, checkpoints, resume=False)
    for again, first in zip(
        trainer.data.examples, toy_drafter_run(finished[0]).data.examples, strict=True
    ):
        assert_same(vars(again), vars(first))


def test_nothing_of_the_target_moves(finished):
    assert_same(target().model, finished[1])
    run = toy_drafter_run(finished[0])
    names = newest_state(run).parameters.keys()
    assert not [n for n in names if "embedding" in n or n.startswith("head")]


def test_every_parameter_of_the_drafter_learns(finished):
    run = toy_drafter_run(finished[0])
    trained, first = newest_state(run).parameters, new_state(run.program).parameters
    same = [name for name in first if np.array_equal(first[name], trained[name])]
    assert same == []


def test_the_folder_loads_and_is_what_was_trained(finished):
    run = toy_drafter_run(finished[0])
    drafter, _ = load_drafter(run.out, run.model, dtype=jnp.float32)
    found = run.program.structure.parameters(dequantize_model(drafter))
    trained = run.program.seen(newest_state(run).parameters)
    for name, value in run.program.structure.parameters(trained).items():
        np.testing.assert_allclose(found[name], value, rtol=2**-8, atol=1e-6, err_msg=name)
    note = json.loads((run.out / "training.json").read_text("utf-8"))
    assert note["step"] == 8 and note["drafter"]["window"] == 24
    assert (run.out / "loss.png").stat().st_size > 1000


def test_a_toy_run_makes_acceptance_go_up(tmp_path):
    run = toy_drafter_run(tmp_path, steps=100, eval_every=100, log_every=20, save_every=100)
    train_drafter(run, QUIET, resume=False)
    log = [record for record in read_log(tmp_path / "train.jsonl") if "loss" in record]
    assert log[-1]["loss"] < 0.8 * log[0]["loss"]
    lengths = [record["acceptance_length"] for record in log]
    assert lengths == sorted(lengths) and lengths[-1] > lengths[0] + 0.3
    for record in log:
        assert all(np.diff(record["survival"]) <= 0)
        assert record["acceptance_length"] == pytest.approx(1 + sum(record["survival"]), rel=1e-5)


def test_a_chunk_at_a_time_is_all_at_once(finished, monkeypatch):
    run = toy_drafter_run(finished[0])
    loaded, program, number = run.loaded, run.program, 0
    pack = jax.tree.map(jnp.asarray, run.data.packs[number])
    anchors = jnp.asarray(next(run.data.order(0, 1))[1])
    captured = capture(loaded.model, None, pack, program)
    drafter = program.seen(newest_state(run).parameters)
    whole = block_sums(drafter, loaded.model, pack, captured, anchors, program)
    monkeypatch.setattr("rl.draft_step.MAX_GATHERED", 24 * 16 * 20)  # 20 blocks, and 96 are no 5
    parts = block_sums(drafter, loaded.model, pack, captured, anchors, program)
    for a, b in zip(leaves(whole), leaves(parts), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_a_step_on_dummies_alone_changes_no_parameter(finished):
    run = toy_drafter_run(finished[0])
    pack = jax.tree.map(jnp.asarray, run.data.packs[0])
    captured = capture(run.loaded.model, None, pack, run.program)
    state, none = newest_state(run), jnp.full(96, -1)
    fresh = new_state(run.program)
    before = leaves(fresh.parameters)
    fresh, metrics = train_step(fresh, run.loaded.model, pack, captured, none, run.program)
    assert float(metrics["loss"]) == 0.0 and float(metrics["blocks"]) == 0.0
    assert_same(fresh.parameters, before)
    assert int(state.step) == 8


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"batch_tokens": 500}, "batch_tokens=500 is not a multiple of block_size=16"),
        ({"batch_tokens": 64}, "batch_tokens=64 cannot hold a dialogue of 512 tokens"),
        ({"answer_tokens": 512}, "answer_tokens=512 leaves nothing of a context of 512"),
        ({"short": 0, "ledger": 0}, "short, ledger and long are all 0"),
        ({"draft_cache": "int8"}, "draft_cache='int8' is not one of f32, bf16, fp8, nvfp4"),
    ],
)
def test_an_impossible_run_is_refused(tmp_path, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        toy_drafter_run(tmp_path, **changes)
    assert not list(tmp_path.iterdir())


def test_a_target_without_a_template_is_refused(tmp_path):
    run = toy_drafter_run(tmp_path)
    bare = replace(run.loaded, template=None)
    with pytest.raises(ValueError, match="has no tokenizer or no chat template"):
        DrafterRun(loaded=bare, drafter=run.drafter, config=run.config, out=tmp_path)


def test_another_run_in_the_folder_is_refused(finished):
    with pytest.raises(ValueError, match="the run began with seed=0, not 1"):
        train_drafter(toy_drafter_run(finished[0], seed=1), QUIET, resume=True)
    with pytest.raises(ValueError, match="holds a training run already"):
        train_drafter(toy_drafter_run(finished[0]), QUIET, resume=False)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--target", "nowhere"], "'nowhere' is neither a bundled model"),
        (["--config", "huge"], "'huge' is neither a TOML file nor one of m3_1_flash, tiny"),
        (["--config", "m3_1_flash"], "taps layer 59 of a model of 5 layers"),
        (["--loss-decay", "0"], "loss_decay=0.0 is not positive"),
        (["window=0"], "window=0 is not at least 1"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, sentence, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["drafter", "--out", str(tmp_path / "run"), *arguments])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()
