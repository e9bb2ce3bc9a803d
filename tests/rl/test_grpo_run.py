"""A GRPO run on a toy: it learns, goes on exactly where it stopped, and refuses what it should."""

import io
import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from minimax_jax.peft import MATRICES
from rl.__main__ import main
from rl.batches import sample_seeds
from rl.grading import Grader
from rl.grpo import GRPOTrainer, new_state, train_grpo
from rl.grpo_export import ADAPTER
from rl.grpo_run import GRPORun, start_run
from rl.learnable import learnable
from rl.live import LiveTable
from rl.local_rollout import LocalRollout
from rl.policy import Policy
from rl.run_checkpoints import RunCheckpoints
from rl.run_log import read_log
from rl.self_checks import self_checks
from tests.rl.grpo_toy import CONFIG, toy_loaded, toy_policy

pytestmark = pytest.mark.slow

QUIET = Console(quiet=True)
LOADED = toy_loaded("nvfp4")
NOWHERE = Path("nowhere")  # the folder of a run that writes nothing


def likes_digits(question, answer):
    """The share of digits in an answer; a random model hardly ever writes one."""
    text = answer.text
    return sum(letter.isdigit() for letter in text) / max(len(text), 1)


def toy_run(out, rollout=None, **changes) -> GRPORun:
    config = replace(CONFIG, plus_minus_one=False, **changes)
    return start_run(config, out, loaded=LOADED, reward=likes_digits, rollout=rollout)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("straight")
    train_grpo(toy_run(out), QUIET, resume=False)
    return out


def steps_of(out):
    return [record for record in read_log(out / "train.jsonl") if "loss" in record]


def trainer_of(run, checkpoints, grader, *, resume):
    return GRPOTrainer(run, QUIET, checkpoints, run.asker(grader), new_state(run), resume=resume)


def newest(run):
    with (
        RunCheckpoints(run.out / "checkpoints", keep=1) as checkpoints,
        Grader(run.reward, 0, 1.0) as grader,
    ):
        return trainer_of(run, checkpoints, grader, resume=True).state


def stop_after(run, steps):
    """Runs the first steps of a run and saves, as an interruption would leave it."""
    with (
        RunCheckpoints(run.out / "checkpoints", keep=1) as checkpoints,
        Grader(run.reward, 0, 1.0) as grader,
    ):
        trainer = trainer_of(run, checkpoints, grader, resume=False)
        windows = trainer.windows()
        for _ in range(steps):
            trainer._report(next(windows))
        trainer.save()


def test_a_run_reports_under_verls_names_and_leaves_its_files(finished):
    records = steps_of(finished)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    for name in (
        *("critic/rewards/mean", "critic/advantages/max", "response_length/clip_ratio"),
        *("actor/pg_loss", "actor/entropy", "actor/grad_norm", "rollout_corr/kl"),
        *(
            "rollout_corr/k3_kl",
            "routing/overlap_mean",
            "timing_s/gen",
            "perf/rollout_tokens_per_s",
        ),
    ):
        assert all(np.isfinite(record[name]) for record in records), name
    assert all(record["rollout_corr/k3_kl"] < 1e-4 for record in records)
    validated = [record for record in read_log(finished / "train.jsonl") if "loss" not in record]
    assert [record["step"] for record in validated] == [0, 4]
    assert "val-core/arithmetic/acc/mean@1" in validated[0]
    assert (finished / ADAPTER / MATRICES).stat().st_size > 1000
    assert json.loads((finished / "training.json").read_text("utf-8"))["step"] == 4
    dumped = (finished / "rollouts" / "step_000002.jsonl").read_text("utf-8").splitlines()
    assert len(dumped) == 8 and {"thought", "answer", "score"} <= json.loads(dumped[0]).keys()


def test_four_steps_are_two_and_two(finished, tmp_path):
    run = toy_run(tmp_path)
    stop_after(run, 2)
    train_grpo(run, QUIET, resume=True)
    straight, resumed = newest(toy_run(finished)), newest(run)
    for a, b in zip(jax.tree.leaves(straight), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)
    timed = ("timing", "perf/", "seconds", "tokens_per_second")
    for one, other in zip(steps_of(finished), steps_of(tmp_path), strict=True):
        assert {n: v for n, v in one.items() if not n.startswith(timed)} == {
            n: v for n, v in other.items() if not n.startswith(timed)
        }


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rank": 8}, "the run began with rank=4, not 8"),
        ({"seed": 1}, "the run began with seed=0, not 1"),
        ({"samples": 2}, "the run began with samples=4, not 2"),
    ],
)
def test_another_run_is_not_resumed(finished, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        train_grpo(toy_run(finished, **changes), QUIET, resume=True)


def test_a_run_goes_on_with_the_same_data_only(tmp_path):
    data = tmp_path / "set.jsonl"
    data.write_text('{"prompt": "a", "label": "1"}\n{"prompt": "b", "label": "2"}\n', "utf-8")
    run = toy_run(tmp_path / "run", data=str(data))
    stop_after(run, 1)
    data.write_text('{"prompt": "a", "label": "1"}\n{"prompt": "c", "label": "2"}\n', "utf-8")
    with pytest.raises(ValueError, match="the run began with questions=2 questions"):
        train_grpo(toy_run(tmp_path / "run", data=str(data)), QUIET, resume=True)


def without_adapter(policy: Policy, request):
    """A rollout that was never handed the adapter."""
    plain = replace(policy, adapter=None)
    return LocalRollout(loaded=LOADED, wave=16)(plain, request)


def with_old_weights(policy: Policy, request):
    rollouts = LocalRollout(loaded=LOADED, wave=16)(policy, request)
    return [replace(one, version=-1) for one in rollouts]


def without_record(policy: Policy, request):
    rollouts = LocalRollout(loaded=LOADED, wave=16)(policy, request)
    return [replace(one, choices=None) for one in rollouts]


@pytest.mark.parametrize(
    ("rollout", "replay", "sentence"),
    [
        (without_adapter, True, "experts chosen by both sides: .* wanted is at least 0.98"),
        (without_adapter, False, "the rollout uses what is trained: .* wanted is at least 3 times"),
        (with_old_weights, True, "of weights -1, not 0"),
        (without_record, True, "no record of experts, which replay=true needs"),
    ],
)
def test_a_rollout_that_is_not_of_the_trainers_weights_never_begins(
    tmp_path, rollout, replay, sentence
):
    """F165, F170."""
    run = toy_run(tmp_path, rollout, replay=replay, check_tolerance=1.0)
    with pytest.raises(ValueError, match=sentence):
        train_grpo(run, QUIET, resume=False)
    assert not steps_of(tmp_path)


def test_a_mismatch_that_is_studied_is_told_and_not_refused():
    run = toy_run(NOWHERE, without_adapter, rollout_cache="fp8")
    with Grader(run.reward, 0, 1.0) as grader:
        checks = self_checks(run, run.asker(grader), new_state(run).parameters)
    assert all(check.holds for check in checks)
    assert [check.wanted for check in checks] == [
        *("none", "exactly one"),
        *["nothing, with rollout_cache=fp8"] * 3,
    ]


def test_dynamic_sampling_asks_on_and_gives_up_with_a_sentence():
    config = replace(CONFIG, dynamic_sampling=True, most_batches=2)
    with Grader(lambda question, answer: 1.0, 0, 1.0) as grader:
        asker = start_run(config, NOWHERE, loaded=LOADED).asker(grader)
        with pytest.raises(ValueError, match="of 4 questions from number 0 on all answers were"):
            asker.batch(toy_policy(LOADED)[1], 0)


def test_faults_take_no_part_and_are_counted():
    def raises_at_odd(question, answer):
        return 1.0 / (len(answer.thought or answer.text) % 2 == 0)

    with Grader(raises_at_odd, 0, 1.0) as grader:
        asker = start_run(CONFIG, NOWHERE, loaded=LOADED).asker(grader)
        batch = asker.batch(toy_policy(LOADED)[1], 0)
    odd = [
        one for group in batch.groups for one in group.answers if len(one.thought or one.text) % 2
    ]
    assert batch.faults["error"] == len(odd) > 0
    assert "ZeroDivisionError" in batch.examples["error"]
    _, advantages = learnable(batch.groups, CONFIG)
    assert np.isfinite(advantages).all()


def test_a_batch_without_a_single_reward_is_one_sentence():
    def raises(question, answer):
        raise OSError("no judge")

    with Grader(raises, 0, 1.0) as grader:
        asker = start_run(CONFIG, NOWHERE, loaded=LOADED).asker(grader)
        batch = asker.batch(toy_policy(LOADED)[1], 0)
    assert batch.faults["error"] == 8
    with pytest.raises(
        ValueError, match="none of 8 answers is left to learn from: 0 were rewarded"
    ):
        learnable(batch.groups, CONFIG)


def test_seeds_depend_on_run_question_and_sample_alone():
    seeds = sample_seeds(0, [5, 6], 3)
    assert len(np.unique(seeds)) == 6 and (seeds >= 0).all()
    np.testing.assert_array_equal(seeds[1], sample_seeds(0, [6], 3)[0])
    assert not np.isin(sample_seeds(1, [5, 6], 3), seeds).any()


def test_plot_draws_runs_and_refuses_other_folders(finished, tmp_path, capsys):
    main(["plot", str(finished), str(finished), "--out", str(tmp_path / "a.png")])
    assert (tmp_path / "a.png").stat().st_size > 10_000
    with pytest.raises(SystemExit):
        main(["plot", str(tmp_path)])
    assert "holds no log of a GRPO run" in capsys.readouterr().err


def test_a_terminal_shows_a_table(finished):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=160)
    with LiveTable(console, 4, 0) as table:
        for record in steps_of(finished):
            table.report(record, "")
    assert "reward" in out.getvalue() and "step 4 of 4" in out.getvalue()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["grpo", "--out", "x", "samples=1"], "samples=1: a group of one has no advantage"),
        (["grpo", "--out", "x", "pack_tokens=100"], "pack_tokens=100 is not a multiple of"),
        (["grpo", "--out", "x", "trained=full"], "trained=full needs plain weights"),
        (["grpo", "--out", "x", "data=no.jsonl"], "there is no file no.jsonl"),
        (["grpo", "--out", "x", "--config", "huge"], "'huge' is neither a TOML file nor one of"),
        (["grpo", "--out", "x", "max_tokens=4096"], "leaves nothing of a context of 2048"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments, sentence, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())
