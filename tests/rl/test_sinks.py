"""A run's numbers arrive where the config sends them."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from configs.rl import GRPOConfig
from rl import sinks
from rl.grpo_run import start_run
from rl.sinks import EVENTS, numbers_of, open_sinks

RECORDS = [{"step": 1, "reward/acc": 0.5, "note": "x"}, {"step": 2, "reward/acc": 0.75}]


def write_all(config, out):
    with open_sinks(config, out) as opened:
        for record in RECORDS:
            for sink in opened:
                sink.write(record["step"], numbers_of(record))
    return opened


def test_without_a_wish_there_are_none(tmp_path):
    assert write_all(GRPOConfig(), tmp_path) == [] and not list(tmp_path.iterdir())


def test_tensorboard_reads_back_what_was_written(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write_all(GRPOConfig(tensorboard=True), tmp_path)
    found = reader.EventAccumulator(str(tmp_path / EVENTS)).Reload()
    assert found.Tags()["tensors"] == ["reward/acc"]
    events = found.Tensors("reward/acc")
    values = [event.tensor_proto.float_val[0] for event in events]
    assert [event.step for event in events] == [1, 2] and values == [0.5, 0.75]


def test_wandb_is_told_of_run_and_steps(tmp_path, monkeypatch):
    told = []
    run = SimpleNamespace(
        log=lambda values, step: told.append((step, values)), finish=lambda: told.append("end")
    )
    module = SimpleNamespace(init=lambda **how: told.append(how) or run)
    monkeypatch.setitem(sys.modules, "wandb", module)
    write_all(GRPOConfig(wandb="arithmetic", seed=3), tmp_path / "run")
    assert told[0]["project"] == "arithmetic" and told[0]["id"] == "run-3"
    assert told[0]["config"]["samples"] == GRPOConfig().samples
    assert told[1:] == [(1, {"reward/acc": 0.5}), (2, {"reward/acc": 0.75}), "end"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"wandb": "p"}, r"wandb=p needs the package wandb: pip install 'minimax-jax\[wandb\]'"),
        ({"tensorboard": True}, "tensorboard=true needs the package tensorboard"),
    ],
)
def test_a_missing_package_is_said_before_anything_is_loaded(
    changes, sentence, monkeypatch, tmp_path
):
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=sentence):
        start_run(replace(GRPOConfig(model="no such model"), **changes), tmp_path)
