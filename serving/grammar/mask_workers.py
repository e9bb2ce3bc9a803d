"""Makes the masks of a step on threads of their own, while the device runs.

llguidance works without the interpreter's lock, so a few threads do. One matcher is worked on by
one thread at a time, since a step asks once for each.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType

import numpy as np

from serving.grammar.matcher import GrammarMatcher


class MaskWorkers:
    """A pool of threads; `close`, or the end of a `with`, ends them all."""

    def __init__(self, num_threads: int):
        if num_threads < 1:
            raise ValueError(f"num_threads={num_threads} is not at least 1")
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar-masks")

    def __enter__(self) -> "MaskWorkers":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def begin(self, asked: Sequence[tuple[GrammarMatcher, Sequence[int]]]) -> "PendingMasks":
        """Begins the masks of each matcher along its drafts."""
        return PendingMasks([self._pool.submit(matcher.masks, drafts) for matcher, drafts in asked])

    def close(self) -> None:
        """Drops what has not begun, waits for the rest and ends the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class PendingMasks:
    """The masks of a step on their way."""

    def __init__(self, rows: Sequence[Future[np.ndarray]]):
        self._rows = rows

    def wait(self) -> list[np.ndarray | RuntimeError]:
        """For each matcher its masks, uint32 [drafts + 1, num_words], or why it has none."""
        wait(self._rows)
        return [self._result(row) for row in self._rows]

    @staticmethod
    def _result(row: Future[np.ndarray]) -> np.ndarray | RuntimeError:
        error = row.exception()
        if error is None:
            return row.result()
        if isinstance(error, RuntimeError):
            return error
        raise error
