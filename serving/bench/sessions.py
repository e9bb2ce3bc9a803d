"""Sessions of agents, planned before anything is sent: the small rebuild of AgentX (specification
serving 4.5, whose figures are inferred fits).

A session has a system prompt with its tools and a first turn; each further turn adds the recorded
answer of the turn before (of the length that was asked for, not what the server said) and a tool's
result. Now and then a turn starts a sub-agent with a context of its own, for which the parent's
next turn waits or not. A context that reaches `compact_at` of the window is cut to its system
prompt and a summary.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from serving.bench.asks import Ask, Segment, concatenated
from serving.bench.options import Agentic
from serving.bench.prefix_hits import EndlessCache, GrowingPrompt, Hits, IdsOf
from serving.bench.words import Words

FULL_WINDOW = 131_072  # for the counts at full size
MARKER = 8  # tokens that no other play has, at the head of each context
COMPACT_AT, COMPACT_TO = 0.85, (0.15, 0.25)  # of the window
CHILD_EVERY, CHILD_TURNS, CHILD_JOINED = 15, (3, 15), 0.5
THINK_MEDIAN_S, THINK_SIGMA, THINK_MOST_S = 2.0, 1.0, 10.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Token counts, at full size by default; a range, or median and mean of a log-normal."""

    window: int
    turns: tuple[int, int]
    system: tuple[int, int] = (13_000, 17_000)
    first: tuple[int, int] = (15_000, 80_000)
    child: tuple[int, int] = (5_000, 5_000)
    output: tuple[float, float] = (200, 520)
    tool_result: tuple[float, float] = (800, 6_000)
    think_scale: float = 1.0

    @classmethod
    def scaled(cls, options: Agentic, window: int) -> "Shape":
        """All counts but the window's times the scale. Raises ValueError for a window in which
        no session has room.
        """
        least, most = options.agentic_turns.values
        scale = options.agentic_scale or min(1.0, window / FULL_WINDOW)
        full = cls(window=window, turns=(0, 0))
        system, first, child = (_range(r, scale) for r in (full.system, full.first, full.child))
        if system[1] + MARKER > COMPACT_TO[0] * window:
            raise ValueError(
                f"a window of {window} tokens is too short for system prompts of up to "
                f"{system[1]}, at most {COMPACT_TO[0]:.0%} of it: lower --agentic-scale"
            )
        return cls(
            window=window,
            turns=(int(least), int(most)),
            system=system,
            first=first,
            child=child,
            output=(full.output[0] * scale, full.output[1] * scale),
            tool_result=(full.tool_result[0] * scale, full.tool_result[1] * scale),
            think_scale=options.agentic_think_scale,
        )


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A request: the first `kept` segments of the one before, and `added` ones, `think_s` seconds
    after it ended. A joined `child`, started when it has ended, is waited for by the next turn.
    """

    request_id: str
    kept: int
    added: Sequence[Segment]
    max_tokens: int
    think_s: float
    child: "Thread | None" = None
    is_joined: bool = False


Thread = tuple[Turn, ...]


class Planner:
    """Makes sessions: equal ones for equal seeds but for the markers, which `play` decides."""

    def __init__(self, shape: Shape, words: Words, seed: int, play: int):
        self._shape, self._words, self._seed = shape, words, seed
        self._markers = np.random.default_rng(play)
        self._name = f"agent-{play & 0xFFFFFF:06x}"

    def session(self, index: int) -> Thread:
        """A session's main thread."""
        random = np.random.default_rng((self._seed, index))
        return self._thread(random, f"{self._name}-{index}", is_child=False)

    def _thread(self, random: np.random.Generator, name: str, *, is_child: bool) -> Thread:
        shape = self._shape
        num_turns = _integer(random, CHILD_TURNS if is_child else shape.turns)
        segments = self._opening(random, is_child)
        turns: list[Turn] = []
        kept, lengths = 0, [len(one.ids or ()) for one in segments]
        for place in range(num_turns):
            max_tokens = _lognormal(random, shape.output, shape.window // 16)
            has_child = not is_child and random.random() < 1 / CHILD_EVERY
            child_name = f"{name}-{place}c"
            turn = Turn(
                request_id=f"{name}-{place}",
                kept=kept,
                added=segments,
                max_tokens=max_tokens,
                think_s=self._think(random) if place else 0.0,
                child=self._thread(random, child_name, is_child=True) if has_child else None,
                is_joined=has_child and bool(random.random() < CHILD_JOINED),
            )
            turns.append(turn)
            kept, segments = self._next(random, lengths, max_tokens)
            lengths = lengths[:kept] + [len(one.ids or ()) for one in segments]
        return tuple(turns)

    def _opening(self, random: np.random.Generator, is_child: bool) -> list[Segment]:
        shape, words = self._shape, self._words
        marker = words.draw(self._markers, MARKER)
        if is_child:
            task = words.draw(random, _integer(random, shape.child))
            return [words.segment("system", marker), words.segment("user", task)]
        system = words.draw(random, _integer(random, shape.system))
        room = int(COMPACT_AT * shape.window) - len(system) - MARKER
        first = words.draw(random, min(_integer(random, shape.first), room))
        return [words.segment("system", marker + system), words.segment("user", first)]

    def _next(
        self, random: np.random.Generator, lengths: list[int], answered: int
    ) -> tuple[int, list[Segment]]:
        """How many segments the next turn keeps, and what it adds."""
        shape, words = self._shape, self._words
        result = _lognormal(random, shape.tool_result, shape.window)
        if sum(lengths) + answered + result <= COMPACT_AT * shape.window:
            said = words.segment("assistant", words.draw(random, answered))
            return len(lengths), [said, words.segment("user", words.draw(random, result))]
        target = random.uniform(*COMPACT_TO) * shape.window
        summary = max(1, int(target) - lengths[0])
        return 1, [words.segment("user", words.draw(random, summary))]

    def _think(self, random: np.random.Generator) -> float:
        drawn = THINK_MEDIAN_S * math.exp(THINK_SIGMA * random.standard_normal())
        return min(drawn, THINK_MOST_S) * self._shape.think_scale


def from_turn(thread: Thread, start: int) -> Iterator[tuple[Turn, list[Segment]]]:
    """The turns from `start` on, each with all its segments."""
    segments: list[Segment] = []
    for place, turn in enumerate(thread):
        segments = [*segments[: turn.kept], *turn.added]
        if place >= start:
            yield turn, segments


def ask_of(turn: Turn, segments: Sequence[Segment]) -> Ask:
    """A turn's request, which is answered at its full length."""
    return Ask(
        request_id=turn.request_id,
        segments=tuple(segments),
        max_tokens=turn.max_tokens,
        ignore_eos=True,
    )


def num_requests(thread: Thread, start: int) -> int:
    """Of a thread from a turn on, with its sub-agents."""
    return sum(1 + len(turn.child or ()) for turn in thread[start:])


def expected_hits(
    thread: Thread, start: int, cache: EndlessCache, ids_of: IdsOf = concatenated
) -> dict[str, Hits]:
    """By request id, what each request of a thread and its sub-agents finds of those before it,
    where the thread starts at a turn, the one before it having been sent to warm up.
    """
    hits: dict[str, Hits] = {}
    prompt, first = GrowingPrompt(), max(start - 1, 0)
    for place, (turn, segments) in enumerate(from_turn(thread, first), first):
        ids = ids_of(segments)
        if ids is None:
            continue
        prompt.become(ids)
        found = cache.hits(prompt)
        if place >= start:
            hits[turn.request_id] = found
            hits |= expected_hits(turn.child, 0, cache, ids_of) if turn.child else {}
    return hits


def _range(full: tuple[int, int], scale: float) -> tuple[int, int]:
    return max(1, round(full[0] * scale)), max(1, round(full[1] * scale))


def _integer(random: np.random.Generator, between: tuple[int, int]) -> int:
    return int(random.integers(between[0], between[1], endpoint=True))


def _lognormal(random: np.random.Generator, fit: tuple[float, float], most: int) -> int:
    """A length of at least 1 and at most `most`, by the median and mean of the distribution."""
    median, mean = fit
    sigma = math.sqrt(2 * math.log(mean / median))
    drawn = median * math.exp(sigma * random.standard_normal())
    return min(max(1, round(drawn)), max(1, most))
