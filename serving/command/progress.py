"""How far a start has come: bars in a terminal, lines of the log elsewhere."""

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

LOG = logging.getLogger(__name__)
Say = Callable[[str], None]  # to those who ask for the server's health


class StartProgress:
    """Two stages, each with the name of what is being done."""

    def __init__(self, console: Console, say: Say):
        self._say, self._stage, self._since = say, "", time.monotonic()
        text = TextColumn("{task.description:<18} {task.fields[name]}")
        columns = (text, BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn())
        self._bars = Progress(*columns, console=console, transient=True)
        self._shows, self._task = console.is_terminal, None
        self._loaded_bytes = 0

    def __enter__(self) -> Self:
        if self._shows:
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shows:
            self._bars.stop()

    def loading(self, name: str, num_bytes: int) -> None:
        """A leaf of the weights is being read."""
        self._loaded_bytes += num_bytes
        self._show("loading weights", name, f"{self._loaded_bytes / 1e9:.2f} GB", None, None)

    def compiling(self, name: str, done: int, total: int) -> None:
        """A program is being compiled."""
        self._show(f"compiling {total} programs", name, f"{done}/{total}", done, total)

    def _show(self, stage: str, name: str, count: str, done: int | None, total: int | None) -> None:
        if stage != self._stage:
            self._stage, self._since = stage, time.monotonic()
            if not self._shows:
                LOG.info("%s", stage)
            elif self._task is not None:
                self._bars.remove_task(self._task)
            self._task = self._bars.add_task(stage, total=total, name="", count="")
        self._say(f"{stage}: {count}")
        assert self._task is not None
        self._bars.update(self._task, completed=done or 0, name=name[-48:], count=count)
