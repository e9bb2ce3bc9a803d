"""Who waits, and for how long others may go first.

The line is in order: the more urgent first, then the older. One that does not fit lets others pass,
but only so many; then nobody behind it is admitted until it is, so it runs within the time in which
the running ones end.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice

from serving.scheduling.request import Request

MAX_BYPASSES = 16  # admissions that may overtake one that does not fit
MAX_BLOCKED = 8  # that are looked at in one step, as looking at a long prompt takes a while
MAX_SCANNED = 256  # in one step


class WaitingLine:
    """Requests that hold nothing, in their order."""

    def __init__(self) -> None:
        self._line: list[Request] = []

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._line)

    def add(self, request: Request) -> None:
        """Puts a request, new or preempted, where its order says."""
        insort(self._line, request, key=_order)

    def remove(self, request: Request) -> None:
        """Takes a request out that is in the line."""
        place = bisect_left(self._line, request.order, key=_order)
        assert self._line[place] is request
        del self._line[place]

    def front(self, *, only_begun: bool) -> list[Request]:
        """Those that a step looks at; if so wanted, of those that were preempted."""
        line = (one for one in self._line if one.num_preemptions) if only_begun else self._line
        return list(islice(line, MAX_SCANNED))


def _order(request: Request) -> tuple[int, int]:
    return request.order
