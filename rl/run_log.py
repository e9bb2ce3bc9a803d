"""What a run reports: JSON lines, a picture of the loss, and a progress bar or, away from a
terminal, plain lines.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SMOOTHING = 0.9  # of the loss curve's moving average


class RunLog:
    """One JSON object a line, each with its `step`."""

    def __init__(self, path: Path, step: int):
        """Opens a log at `step`; what an interrupted run wrote beyond it is dropped, since it will
        be written again.
        """
        self.path = path
        kept = [record for record in read_log(path) if record["step"] <= step]
        path.write_text("".join(_line(record) for record in kept), "utf-8")

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(record))


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log, none if there is no file; a last line that was cut off by a crash is
    left out.
    """
    lines = path.read_text("utf-8").splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Some numbers of the log over the steps, in one picture."""

    names: tuple[str, ...]
    ylabel: str
    ylim: tuple[float, float] | None = None
    log: bool = False


def plot_log(path: Path, picture: Path, panels: Sequence[Panel]) -> None:
    """Draws panels one above the other; the training loss with its moving average."""
    records = read_log(path)
    figure = Figure(figsize=(8, 3.5 * len(panels)), layout="constrained")
    for axes, panel in zip(figure.subplots(len(panels), 1, sharex=True), panels, strict=True):
        for name in panel.names:
            smooth, label = name == "loss", name.replace("_", " ")
            _curve(axes, records, name, alpha=0.3 if smooth else 1.0, label=label)
            if smooth:
                _curve(axes, records, name, smooth=True, label="loss, moving average")
        axes.set(yscale="log" if panel.log else "linear", ylabel=panel.ylabel, ylim=panel.ylim)
        axes.legend()
        axes.set(xlabel="step")
    figure.savefig(picture, dpi=100)


def _curve(axes, records, name: str, *, smooth: bool = False, **style: Any) -> None:
    points = [(record["step"], record[name]) for record in records if name in record]
    if not points:
        return
    steps, values = zip(*points, strict=True)
    axes.plot(steps, _moving_average(values) if smooth else values, **style)


def _moving_average(values) -> list[float]:
    averages, weight, total = [], 0.0, 0.0
    for value in values:
        weight = SMOOTHING * weight + 1 - SMOOTHING
        total = SMOOTHING * total + (1 - SMOOTHING) * value
        averages.append(total / weight)
    return averages


class Reporter:
    """Shows how far a run is: a bar on a terminal, a line a report elsewhere. Use as a context
    manager.
    """

    def __init__(self, console: Console, total: int, done: int):
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("training", total=total, completed=done, text="")
        self._console = console
        self._total = total

    def __enter__(self) -> "Reporter":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def report(self, record: Mapping[str, Any], more: str) -> None:
        """A step's means; `more` is shown on a plain line only."""
        speed = f"{record['tokens_per_second']:,.0f} tok/s"
        step, text = record["step"], f"loss {record['loss']:.4f}  {speed}"
        self._progress.update(self._task, completed=step, text=text)
        if not self._console.is_terminal:
            self.say(f"step {step}/{self._total}  {text}  {more}")

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class Stopwatch:
    """Seconds of a run, those before it was resumed included."""

    def __init__(self, before: float):
        self._before, self._start = before, time.monotonic()

    @property
    def this_session(self) -> float:
        """Since this process began to train."""
        return time.monotonic() - self._start

    @property
    def total(self) -> float:
        """Since step 0."""
        return self._before + self.this_session


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record) + "\n"
