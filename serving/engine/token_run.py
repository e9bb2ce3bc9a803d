"""Consecutive tokens of a sequence with their log-probabilities, as far as these are wanted."""

from itertools import islice

from serving.engine_api import Logprobs
from serving.scheduling.plan import RowLogprobs


class TokenRun:
    """Tokens that have not been told yet. `num_top` is how many of the likeliest tokens are wanted
    at each place; None: no log-probabilities at all.
    """

    __slots__ = ("ids", "num_top", "top_ids", "top_values", "values")

    def __init__(self, num_top: int | None = None):
        self.num_top = num_top
        self.ids: list[int] = []
        if num_top is None:
            return  # there may be thousands of these a second
        self.values: list[float | None] = []
        self.top_ids: list[list[int]] = []
        self.top_values: list[list[float]] = []

    def add(self, ids: list[int], row: RowLogprobs | None) -> None:
        """Adds tokens; of their log-probabilities as many as there are tokens."""
        self.ids += ids
        if not ids or self.num_top is None:
            return
        assert row is not None, "the device left out log-probabilities that were asked for"
        if len(row.values) == len(ids) and len(row.top_ids[0]) == self.num_top:
            self.values += row.values
            self.top_ids += row.top_ids
            self.top_values += row.top_values
        else:
            self.values += row.values[: len(ids)]
            self.top_ids += _cut(row.top_ids, len(ids), self.num_top)
            self.top_values += _cut(row.top_values, len(ids), self.num_top)

    def add_run(self, other: "TokenRun") -> None:
        """Adds the tokens of another run of that kind."""
        self.ids += other.ids
        if self.num_top is not None:
            self.values += other.values
            self.top_ids += other.top_ids
            self.top_values += other.top_values

    def take(self, count: int) -> "TokenRun":
        """The first tokens, which leave this run."""
        taken = TokenRun(self.num_top)
        for name in ("ids",) if self.num_top is None else self.__slots__:
            if name != "num_top":
                own = getattr(self, name)
                setattr(taken, name, own[:count])
                del own[:count]
        return taken

    def logprobs(self) -> Logprobs | None:
        """Its log-probabilities, where they are wanted and there are any."""
        if self.num_top is None or not self.ids:
            return None
        return Logprobs(
            token_ids=self.ids,
            values=self.values,
            top_ids=self.top_ids,
            top_values=self.top_values,
        )


class PromptScores:
    """The log-probabilities of a prompt, as its chunks come; its first token has none."""

    __slots__ = ("_num_top", "_run")

    def __init__(self, num_top: int):
        self._num_top = num_top
        self._run = TokenRun(num_top)

    @property
    def count(self) -> int:
        """Tokens that have theirs: one less than the prompt when it is whole."""
        return len(self._run.values)

    def add(self, start: int, row: RowLogprobs) -> None:
        """Takes those of the chunk that begins at a position. A chunk that is computed again, after
        a preemption, replaces what it gave before.
        """
        run = self._run
        assert start <= len(run.values), "a chunk was left out"
        for own in (run.values, run.top_ids, run.top_values):
            del own[start:]
        run.values += row.values
        run.top_ids += _cut(row.top_ids, len(row.values), self._num_top)
        run.top_values += _cut(row.top_values, len(row.values), self._num_top)

    def of(self, prompt: list[int]) -> Logprobs:
        """Those of the whole prompt."""
        run, following = self._run, len(prompt) - 1
        assert len(run.values) == following, f"{len(run.values)} scores of {following} tokens"
        return Logprobs(
            token_ids=prompt,
            values=[None, *run.values],
            top_ids=[[], *run.top_ids],
            top_values=[[], *run.top_values],
        )


def _cut(rows: list, count: int, num_top: int) -> list:
    """The first `num_top` of each of the first rows; a device may give more than were asked for."""
    return [row[:num_top] for row in islice(rows, count)]
