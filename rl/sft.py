"""Supervised training from scratch: packs in, a complete checkpoint folder out, exact resume in
between.

A run's folder holds `train.jsonl` and `loss.png`, `checkpoints/` to resume from, and, when a
session ends, `model/`: the model in the checkpoint format with tokenizer and template, and
`training.json`, which says how it came to be.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from minimax_jax.chat import ChatTemplate, Tokenizer
from minimax_jax.checkpoint import save_model
from minimax_jax.checkpoint_folder import copy_companions
from minimax_jax.loaded import LoadedModel
from rl.data import SHORT, TRAIN
from rl.evaluate import held_out, score_model, total
from rl.optimizer import schedule
from rl.pack_stream import packs
from rl.run_checkpoints import RunCheckpoints, abstract_like
from rl.run_log import Reporter, RunLog, Stopwatch, plot_log
from rl.sft_run import Run, check_same_run, fixed_part, measured_packs
from rl.sft_step import (
    FORMAT,
    Metrics,
    Program,
    TrainState,
    measure,
    new_state,
    seen_model,
    train_step,
)

FIRST_STOP_PROBLEM = (
    1_000_000  # the problems that decide when to stop are none of those that `eval` asks
)


def train(run: Run, console: Console, *, resume: bool) -> None:
    """Trains until the last step, the wanted exact match or the time limit, and writes everything.

    Raises ValueError before anything is written when the folder holds another run, or none to
    resume.
    """
    folder = run.out / "checkpoints"
    if not resume and folder.exists():
        raise ValueError(f"{run.out} holds a training run already: give --resume or another --out")
    if resume and not folder.exists():
        raise ValueError(f"{run.out} holds no training run to resume")
    with RunCheckpoints(folder, run.config.keep) as checkpoints:
        Trainer(run, console, checkpoints, resume=resume).train()


class Trainer:
    """One session of a run."""

    def __init__(self, run: Run, console: Console, checkpoints: RunCheckpoints, *, resume: bool):
        self.run, self.checkpoints = run, checkpoints
        self.sparse = Program(model=run.model, config=run.config)
        self.dense = replace(self.sparse, every_block=True)
        # placed, as a restored state is: one compilation for both
        self.state = jax.device_put(new_state(self.sparse), jax.devices()[0])
        self.step, self.tokens, seconds = 0, 0.0, 0.0
        if resume:
            arrays, note = checkpoints.restore(abstract_like(vars(self.state)))
            self.state = TrainState(**arrays)
            check_same_run(note["fixed"], run)
            self.step, self.tokens, seconds = note["step"], note["tokens"], note["seconds"]
        self.log = RunLog(run.out / "train.jsonl", self.step)
        self.watch = Stopwatch(seconds)
        self.reporter = Reporter(console, run.config.steps, self.step)
        self.measured = list(measured_packs(run))
        self.last: dict[str, Any] = {}

    def train(self) -> None:
        """Steps until one of the ends, then the export."""
        config = self.run.config
        reason = "all steps are done"
        with self.reporter:
            for window in self._windows():
                self._report(window)
                found = self.evaluate() if self._due(config.eval_every) else None
                if found is not None and config.stop_at is not None and found >= config.stop_at:
                    reason = f"exact match {found:.3f} has reached {config.stop_at}"
                    break
                if config.max_seconds is not None and self.watch.this_session > config.max_seconds:
                    reason = f"{config.max_seconds:g} seconds are over; --resume goes on"
                    break
                if self._due(config.save_every):
                    self._save()
            self._save()
            self.reporter.say(f"stopped at step {self.step}: {reason}")
        self.export(reason)

    def evaluate(self) -> float:
        """Measures on held-out problems, logs it, and returns the exact match on short ones."""
        record: dict[str, Any] = {"step": self.step}
        for kind, pack in self.measured:
            sums = record.setdefault(kind, np.zeros(3))
            sums += np.asarray(measure(self.state.parameters, pack, self.sparse))
        for kind in dict(self.measured):
            loss, hits, count = record.pop(kind)
            record |= {f"{kind}_loss": loss / count, f"{kind}_accuracy": hits / count}
        asked = held_out(self.run.config.eval_problems, SHORT, start=FIRST_STOP_PROBLEM)
        scores = score_model(self.loaded(), asked, temperature=1.0, seed=self.run.config.seed)
        record["exact_match"] = total(scores.values()).rate
        record["families"] = {family: score.rate for family, score in scores.items()}
        self.last |= record
        self.log.append(record)
        self.reporter.say(f"step {self.step}: {_sentence(record)}")
        return record["exact_match"]

    def loaded(self) -> LoadedModel:
        """The model as it stands, ready to generate."""
        return LoadedModel(
            model=seen_model(self.state.parameters, self.sparse),
            formats=self.sparse.layout.formats,
            folder=self.run.text,
            tokenizer=Tokenizer.load(self.run.text),
            template=ChatTemplate.load(self.run.text),
        )

    def export(self, reason: str) -> None:
        """Writes the model as a complete checkpoint folder, over that of an earlier session, and
        the picture.
        """
        out, folder = self.run.out, self.run.out / "model"
        plot_log(out / "train.jsonl", out / "loss.png")
        if folder.exists():
            shutil.rmtree(folder)
        save_model(self.sparse.structure.model(self.state.parameters), folder, format=FORMAT)
        copy_companions(self.run.text, folder)
        summary = {
            "model": asdict(self.run.model),
            "config": asdict(self.run.config),
            "ended": reason,
            "device": jax.devices()[0].device_kind,
            **self._note(),
            "last": self.last,
        }
        text = json.dumps(summary, indent=2) + "\n"
        (folder / "training.json").write_text(text, "utf-8")

    def _windows(self) -> Iterator[list[Metrics]]:
        """Runs the steps; hands out the metrics that came together, at every log, evaluation and
        save.
        """
        config = self.run.config
        every = (config.log_every, config.eval_every, config.save_every, config.steps)
        window: list[Metrics] = []
        recipe = self.run.recipe(TRAIN)
        for pack in packs(recipe, self.step, config.steps, config.workers):
            is_dense = recipe.kind(self.step) != "short" and self.step < config.dense_steps
            program = self.dense if is_dense else self.sparse
            pack = jax.tree.map(jnp.asarray, pack)
            self.state, metrics = train_step(self.state, pack, program)
            window.append(metrics)
            self.step += 1
            if any(self._due(n) for n in every):
                yield window
                window = []

    def _report(self, window: list[Metrics]) -> None:
        """Logs the means of some steps; the first that is not a number ends the run with a
        sentence.
        """
        before = self.last.get("seconds", self.watch.total - self.watch.this_session)
        window = jax.device_get(window)
        columns = {name: np.array([step[name] for step in window], float) for name in window[0]}
        seconds, tokens = self.watch.total, columns.pop("tokens").sum()
        looked, caught = columns.pop("looked").sum(), columns.pop("caught").sum()
        bad = np.flatnonzero(~np.isfinite(columns["loss"]))
        if len(bad):
            step = self.step - len(window) + int(bad[0])
            raise ValueError(f"the loss of step {step} is {columns['loss'][bad[0]]}")
        self.tokens += float(tokens)
        record = {
            "step": self.step,
            **{name: float(values.mean()) for name, values in columns.items()},
            "indexer_caught": float(caught / looked) if looked else 1.0,
            "learning_rate": float(jnp.asarray(schedule(self.run.config)(self.step))),
            "tokens_per_second": float(tokens / max(seconds - before, 1e-9)),
            "seconds": seconds,
        }
        self.last |= record
        self.log.append(record)
        self.reporter.report(record)

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.run.config.steps

    def _save(self) -> None:
        note = {**self._note(), "fixed": fixed_part(self.run)}
        self.checkpoints.save(self.step, vars(self.state), note)

    def _note(self) -> dict[str, Any]:
        return {"step": self.step, "tokens": self.tokens, "seconds": self.watch.total}


def _sentence(record: dict[str, Any]) -> str:
    parts = [
        f"{name.replace('_', ' ')} {value:.3f}"
        for name, value in record.items()
        if name.endswith("accuracy") or name == "exact_match"
    ]
    return "held out: " + ", ".join(parts)
