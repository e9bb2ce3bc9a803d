"""One session of a training run: steps, log, measurements, checkpoints, until one of its ends.

What is trained and on what is a subclass's; a run that is resumed goes on exactly where its newest
checkpoint stands.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from rl.optimizer import Metrics, OptimizerConfig, TrainState, schedule
from rl.run_checkpoints import RunCheckpoints, abstract_like
from rl.run_log import Panel, Reporter, RunLog, Stopwatch, plot_log


@runtime_checkable
class SessionConfig(OptimizerConfig, Protocol):
    """The fields of a run's config that a session reads."""

    @property
    def log_every(self) -> int: ...
    @property
    def eval_every(self) -> int: ...
    @property
    def save_every(self) -> int: ...
    @property
    def keep(self) -> int: ...
    @property
    def max_seconds(self) -> float | None: ...


@runtime_checkable
class AnyRun(Protocol):
    """A run: its config, its folder, and what may not change when it is resumed."""

    @property
    def config(self) -> SessionConfig: ...
    @property
    def out(self) -> Path: ...
    @property
    def fixed(self) -> dict[str, Any]: ...


class Session(ABC):
    """The loop that all trainers share."""

    panels: ClassVar[tuple[Panel, ...]]  # of the picture

    def __init__(
        self,
        run: Any,
        console: Console,
        checkpoints: RunCheckpoints,
        state: TrainState,
        *,
        resume: bool,
    ):
        self.run, self.checkpoints = run, checkpoints
        self.state = self.placed(state)
        self.step, self.tokens, seconds = 0, 0.0, 0.0
        self.noted: dict[str, Any] = {}  # beside the newest checkpoint, if the run is resumed
        if resume:
            # before the arrays, which may be of other shapes then
            check_same_run(checkpoints.note()["fixed"], run)
            arrays, note = checkpoints.restore(abstract_like(vars(self.state)))
            self.noted = note
            self.state = TrainState(**arrays)
            self.step, self.tokens, seconds = note["step"], note["tokens"], note["seconds"]
        self.log = RunLog(run.out / "train.jsonl", self.step)
        self.watch = Stopwatch(seconds)
        self.reporter = Reporter(console, run.config.steps, self.step)
        self.last: dict[str, Any] = {}

    def placed(self, state: TrainState) -> TrainState:
        """The state where a restored one is, so that one compilation is for both."""
        return jax.device_put(state, jax.devices()[0])

    @abstractmethod
    def updates(self) -> Iterator[Metrics]:
        """Makes step after step, from `self.step` on; each one's metrics, with `loss` and
        `tokens`.
        """

    @abstractmethod
    def summary(self, columns: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """What the log says of some steps, whose metrics are columns [steps, ...]."""

    @abstractmethod
    def line(self, record: Mapping[str, Any]) -> str:
        """What a plain line shows of a record beside loss and speed."""

    @abstractmethod
    def evaluate(self) -> str | None:
        """Measures on held-out problems and logs it; a reason to end the run, if it is one."""

    @abstractmethod
    def export(self, summary: Mapping[str, Any]) -> None:
        """Writes what was trained, over that of an earlier session, and how it came to be."""

    def train(self) -> None:
        """Steps until one of the ends, then the export."""
        config, reason = self.run.config, "all steps are done"
        with self.reporter:
            for window in self.windows():
                self._report(window)
                found = self.evaluate() if self._due(config.eval_every) else None
                if found is not None:
                    reason = found
                    break
                if config.max_seconds is not None and self.watch.this_session > config.max_seconds:
                    reason = f"{config.max_seconds:g} seconds are over; --resume goes on"
                    break
                if self._due(config.save_every):
                    self.save()
            self.save()
            self.reporter.say(f"stopped at step {self.step}: {reason}")
        plot_log(self.run.out / "train.jsonl", self.run.out / "loss.png", self.panels)
        device = jax.devices()[0].device_kind
        self.export({"ended": reason, "device": device, **self._note(), "last": self.last})

    def windows(self) -> Iterator[list[Metrics]]:
        """Runs the steps; hands out the metrics that came together, at every log, evaluation and
        save.
        """
        config = self.run.config
        every = (config.log_every, config.eval_every, config.save_every, config.steps)
        window: list[Metrics] = []
        for metrics in self.updates():
            window.append(metrics)
            self.step += 1
            if any(self._due(n) for n in every):
                yield window
                window = []

    def save(self) -> None:
        """Stores a checkpoint of this step."""
        note = {**self._note(), "fixed": self.run.fixed}
        self.checkpoints.save(self.step, vars(self.state), note)

    def note(self, record: Mapping[str, Any]) -> None:
        """Adds a record to the log."""
        self.last |= record
        self.log.append(record)

    def _report(self, window: list[Metrics]) -> None:
        """Logs some steps; the first whose loss is not a number ends the run with a sentence."""
        before = self.last.get("seconds", self.watch.total - self.watch.this_session)
        window = jax.device_get(window)
        columns = {name: np.array([step[name] for step in window], float) for name in window[0]}
        seconds, tokens = self.watch.total, columns.pop("tokens").sum()
        bad = np.flatnonzero(~np.isfinite(columns["loss"]))
        if len(bad):
            step = self.step - len(window) + int(bad[0])
            raise ValueError(f"the loss of step {step} is {columns['loss'][bad[0]]}")
        self.tokens += float(tokens)
        record = {
            "step": self.step,
            **self.summary(columns),
            "learning_rate": float(jnp.asarray(schedule(self.run.config)(self.step))),
            "tokens_per_second": float(tokens / max(seconds - before, 1e-9)),
            "seconds": seconds,
        }
        self.note(record)
        self.reporter.report(record, self.line(record))

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.run.config.steps

    def _note(self) -> dict[str, Any]:
        return {"step": self.step, "tokens": self.tokens, "seconds": self.watch.total}


def open_checkpoints(run: AnyRun, *, resume: bool) -> RunCheckpoints:
    """The checkpoints of a run. Raises ValueError before anything is written when the folder holds
    another run, or none to resume.
    """
    folder = run.out / "checkpoints"
    if not resume and folder.exists():
        raise ValueError(f"{run.out} holds a training run already: give --resume or another --out")
    if resume and not folder.exists():
        raise ValueError(f"{run.out} holds no training run to resume")
    return RunCheckpoints(folder, run.config.keep)


def check_same_run(noted: Mapping[str, Any], run: AnyRun) -> None:
    """Raises ValueError when a checkpoint's note is not of this run."""
    for name, value in run.fixed.items():
        if noted.get(name) != value:
            raise ValueError(f"the run began with {name}={noted.get(name)}, not {value}")


def means(columns: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Each column's mean over the steps: a number, or a list of them."""
    return {name: values.mean(axis=0).tolist() for name, values in columns.items()}
