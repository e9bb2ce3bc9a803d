"""Plays sessions of agents: lanes that each run one session tree at a time, as AgentX does."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from serving.bench.asks import concatenated
from serving.bench.load import Load
from serving.bench.prefix_hits import EndlessCache, Hits, IdsOf
from serving.bench.sessions import Planner, Thread, ask_of, expected_hits, from_turn


@dataclass(frozen=True, kw_only=True)
class Play:
    """A session and the turn at which it is begun."""

    session: Thread
    start: int = 0


def plan(
    planner: Planner, *, num_sessions: int, lanes: int, start: tuple[float, float], seed: int
) -> list[Play]:
    """The sessions in the order in which lanes take them. The first of each lane begins somewhere
    within `start` (shares of its turns), so that the load is from the outset what it is later.
    """
    random = np.random.default_rng((seed, 1))
    plays = []
    for index in range(num_sessions):
        session = planner.session(index)
        share = random.uniform(start[0], start[1]) if index < lanes else 0.0
        plays.append(Play(session=session, start=int(share * len(session))))
    return plays


def hits_of_plays(
    plays: Iterable[Play], block_size: int, ids_of: IdsOf = concatenated
) -> dict[str, Hits]:
    """By request id, what each finds; sessions share nothing, so each has a cache of its own."""
    hits: dict[str, Hits] = {}
    for play in plays:
        hits |= expected_hits(play.session, play.start, EndlessCache(block_size), ids_of)
    return hits


async def play_all(load: Load, plays: Sequence[Play], lanes: int) -> None:
    """Plays them in so many lanes; a lane that is through takes the next."""
    left = iter(plays)
    async with asyncio.TaskGroup() as group:
        for _ in range(min(lanes, len(plays))):
            group.create_task(_lane(load, left))


async def _lane(load: Load, left: Iterable[Play]) -> None:
    for play in left:
        await _play(load, play.session, play.start)


async def _play(load: Load, thread: Thread, start: int) -> None:
    """Sends a thread's turns, after one token of the turn before the first, to warm up, and those
    of its sub-agents; a turn that fails does not end it.
    """
    joined: asyncio.Task[None] | None = None
    async with asyncio.TaskGroup() as group:
        for turn, segments in from_turn(thread, max(start - 1, 0)):
            ask = ask_of(turn, segments)
            if start and turn is thread[start - 1]:
                await load.send(replace(ask, max_tokens=1, is_measured=False))
                continue
            if joined is not None:
                await joined
            await asyncio.sleep(turn.think_s)
            await load.send(ask)
            child = group.create_task(_play(load, turn.child, 0)) if turn.child else None
            joined = child if turn.is_joined else None
