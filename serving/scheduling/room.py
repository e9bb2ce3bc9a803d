"""Preemption: who gives way when blocks run out.

The last in order of a rank gives way: the least urgent, then the youngest. It loses its pages and
computes its tokens again later, mostly from the prefix cache. Only a more urgent or an older
sequence takes from it, so the first in order never stops, everything ends, and no two sequences
preempt each other. A sequence that may take from nobody keeps its blocks and waits.
"""

from serving.scheduling.rank import Rank
from serving.scheduling.request import Request
from serving.scheduling.waiting import WaitingLine

Order = tuple[int, float]


class Room:
    """Makes room on ranks by sending sequences back to the line."""

    def __init__(self, waiting: WaitingLine):
        self._waiting = waiting
        self.num_preemptions = 0

    def make(self, rank: Rank, num_blocks: int, order: Order) -> bool:
        """Whether so many blocks are there now, after what those behind `order` had to give.

        False also while they are coming: blocks of a preempted sequence that still drains.
        """
        pages = rank.pages
        while pages.num_available + rank.num_coming < num_blocks:
            if not rank.running or rank.running[-1].order <= order:
                return False
            self.preempt(rank, rank.running[-1])
        return pages.num_available >= num_blocks

    def could_make(self, rank: Rank, num_blocks: int, order: Order) -> bool:
        """Whether `make` would come to so many blocks in the end. A lower bound: of blocks that
        several victims share none is counted.
        """
        total = rank.pages.num_available + rank.num_coming
        for victim in reversed(rank.running):
            if total >= num_blocks or victim.order <= order:
                break
            total += rank.pages.num_sole(victim.blocks)
        return total >= num_blocks

    def preempt(self, rank: Rank, victim: Request) -> None:
        """Sends a running sequence back to the line, now or when it has drained."""
        victim.num_preemptions += 1
        self.num_preemptions += 1
        if rank.leave(victim):
            self._waiting.add(victim)
