"""A GRPO run on the terminal: a table of the last steps that is drawn anew, and how far it is; away
from a terminal one line a step.
"""

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

ROWS = 12
COLUMNS = {
    "step": ("step", "{:.0f}"),
    "reward": ("critic/rewards/mean", "{:+.3f}"),
    "acc": ("reward/acc", "{:.3f}"),
    "kl (k3)": ("rollout_corr/k3_kl", "{:.1e}"),
    "entropy": ("actor/entropy", "{:.3f}"),
    "clipped": ("actor/pg_clipfrac", "{:.1e}"),
    "grad": ("actor/grad_norm", "{:.2f}"),
    "length": ("response_length/mean", "{:.1f}"),
    "equal": ("reward/zero_std_frac", "{:.2f}"),
    "gen s": ("timing_s/gen", "{:.1f}"),
    "update s": ("timing_s/update_actor", "{:.1f}"),
    "tok/s": ("perf/rollout_tokens_per_s", "{:,.0f}"),
}


class LiveTable:
    """Use as a context manager; takes what `rl.session.Session` reports."""

    def __init__(self, console: Console, total: int, done: int):
        self._console, self._total, self._done = console, total, done
        self._first, self._started = done, time.monotonic()
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=ROWS)
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> "LiveTable":
        self._started = time.monotonic()
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def report(self, record: Mapping[str, Any], more: str) -> None:
        """A step's metrics; `more` is shown on a plain line only."""
        self._rows.append(record)
        self._done = record["step"]
        if self._live is None:
            self.say(f"step {self._done}/{self._total}  {more}  {self._left()}")
        else:
            self._live.update(self._table(), refresh=True)

    def say(self, text: str) -> None:
        """A line above the table."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _table(self) -> Group:
        table = Table(*COLUMNS)
        for record in self._rows:
            cells = (form.format(record[name]) for name, form in COLUMNS.values() if name in record)
            table.add_row(*cells)
        return Group(table, Text(f"step {self._done} of {self._total}, {self._left()}"))

    def _left(self) -> str:
        """How long the rest will take, from the mean so far."""
        steps = self._done - self._first
        if not steps:
            return ""
        seconds = (time.monotonic() - self._started) / steps * (self._total - self._done)
        return f"{seconds / 60:.0f} min left"
