"""A supervised run learns, goes on exactly where it stopped, and ends in a loadable checkpoint."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from rich.console import Console

from minimax_jax.loaded import load
from minimax_jax.quantize import dequantize_model
from rl.__main__ import main
from rl.pack_stream import make_pack
from rl.run_checkpoints import RunCheckpoints
from rl.run_log import read_log
from rl.sft import Trainer, train
from rl.sft_run import start_run
from rl.sft_step import measure
from tests.rl.toy import CONFIG, MODEL, TEXT, toy_run

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of all eight steps."""
    out = tmp_path_factory.mktemp("straight")
    train(toy_run(out), QUIET, resume=False)
    return out


def newest_state(run):
    with RunCheckpoints(run.out / "checkpoints", keep=1) as checkpoints:
        trainer = Trainer(run, QUIET, checkpoints, resume=True)
    return trainer.state


def test_eight_steps_are_three_and_five(finished, tmp_path):
    run = toy_run(tmp_path)
    stop_after(run, 3)
    train(run, QUIET, resume=True)
    straight, resumed = newest_state(toy_run(finished)), newest_state(run)
    assert straight.step == 8
    for a, b in zip(jax.tree.leaves(straight), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)


def stop_after(run, steps: int) -> None:
    """Runs the first steps of a run and saves, as an interruption would leave it."""
    with RunCheckpoints(run.out / "checkpoints", keep=1) as checkpoints:
        trainer = Trainer(run, QUIET, checkpoints, resume=False)
        windows = trainer.windows()
        while trainer.step < steps:
            next(windows)
        assert trainer.step == steps
        trainer.save()


def test_the_log_of_a_resumed_run_has_each_step_once(finished):
    steps = [record["step"] for record in read_log(finished / "train.jsonl") if "loss" in record]
    assert steps == [2, 3, 4, 6, 8]


def test_the_loss_falls(finished):
    losses = [record["loss"] for record in read_log(finished / "train.jsonl") if "loss" in record]
    assert losses[-1] < 0.75 * losses[0]


def test_a_run_ends_in_a_checkpoint_that_gives_what_was_measured(finished):
    run = toy_run(finished)
    assert (TEXT / "dspark").is_dir() and not (finished / "model" / "dspark").exists()
    loaded = load(finished / "model")
    assert loaded.config.num_tokens == loaded.tokenizer.num_tokens
    assert loaded.formats.kv == loaded.formats.index == "nvfp4"
    with RunCheckpoints(finished / "checkpoints", keep=1) as checkpoints:
        trainer = Trainer(run, QUIET, checkpoints, resume=True)
    pack = jax.tree.map(jax.numpy.asarray, make_pack(run.recipe("held_out"), 0))
    trained = measure(trainer.state.parameters, pack, trainer.sparse)
    stored = trainer.sparse.structure.parameters(float_model(loaded.model))
    # plain weights become BF16 in the file, which moves the mean loss a little
    np.testing.assert_allclose(measure(stored, pack, trainer.sparse)[0], trained[0], rtol=5e-3)


def float_model(model):
    return jax.tree.map(lambda x: x.astype(np.float32), dequantize_model(model))


def test_the_training_note_says_how_the_model_came_to_be(finished):
    note = json.loads((finished / "model" / "training.json").read_text("utf-8"))
    assert note["step"] == 8
    assert note["config"]["learning_rate"] == CONFIG.learning_rate
    assert 8 * 300 < note["tokens"] <= 8 * CONFIG.batch_tokens
    assert (finished / "loss.png").stat().st_size > 1000


def test_a_run_stops_at_its_exact_match(tmp_path, monkeypatch):
    run = toy_run(tmp_path, eval_every=2, stop_at=0.5)
    monkeypatch.setattr(Trainer, "answers", lambda trainer: {"exact_match": 0.1 * trainer.step})
    train(run, QUIET, resume=False)
    note = json.loads((tmp_path / "model" / "training.json").read_text("utf-8"))
    assert note["step"] == 6
    assert note["ended"] == "exact match 0.600 has reached 0.5"


@pytest.mark.parametrize(
    ("changes", "resume", "sentence"),
    [
        ({}, False, "holds a training run already: give --resume or another --out"),
        ({"seed": 1}, True, "the run began with seed=0, not 1"),
    ],
)
def test_another_run_in_the_folder_is_refused(finished, changes, resume, sentence):
    with pytest.raises(ValueError, match=sentence):
        train(toy_run(finished, **changes), QUIET, resume=resume)


def test_there_must_be_a_run_to_resume(tmp_path):
    with pytest.raises(ValueError, match="holds no training run to resume"):
        train(toy_run(tmp_path), QUIET, resume=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"batch_tokens": 500}, "batch_tokens=500 is not a multiple of block_size=16"),
        ({"batch_tokens": 64, "long_fraction": 0.5}, "64 cannot hold a long problem of 128 tokens"),
    ],
)
def test_an_impossible_pack_is_refused(tmp_path, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        toy_run(tmp_path, **changes)


def test_the_vocabulary_must_hold_the_tokenizer(tmp_path):
    small = replace(MODEL, vocab_size=256, num_tokens=256)
    with pytest.raises(ValueError, match="tokens, more than vocab_size=256"):
        start_run(small, CONFIG, TEXT, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["sft", "--out", "x", "--steps", "0"], "steps=0 is not at least 1"),
        (["sft", "--out", "x", "--config", "huge"], "'huge' is neither a TOML file nor one of"),
        (["sft", "--out", "x", "--stop-at", "2"], "stop_at=2.0 is not in (0, 1]"),
        (["sft", "--out", "x", "--text", "nowhere"], "nowhere holds no tokenizer"),
        (["eval", "--model", "nowhere"], "'nowhere' is neither a bundled model"),
        (["eval", "--n", "0"], "n=0 is not at least 1"),
        (["eval", "--family", "poems"], "family 'poems' is not one of short, sum"),
        (["eval", "--temperature", "-1"], "temperature=-1.0 is not a number from 0 on"),
        (["tokenizer", "nowhere"], "nowhere holds no chat template"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_eval_reports_every_family(finished, capsys):
    main(["eval", "--model", str(finished / "model"), "--n", "4", "--json"])
    scores = json.loads(capsys.readouterr().out)
    assert scores["all"]["n"] == 4
    assert sum(score["n"] for name, score in scores.items() if name != "all") == 4
    assert scores["all"]["low"] == 0.0 < scores["all"]["high"] < 1.0
