"""What a step costs on this machine: its size against the steps a second, measured or read from
JSON (spec/dspark 4.4).

The scheduler of drafts weighs these times against the tokens that it expects, so both parts of a
speculative step have a table: the target's tokens, and the drafts that the drafter proposes. A
table holds for the context length, the parallelism and the kernels that it was measured with.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

Step = Callable[[int], float]  # runs a step of that many tokens to its end; its seconds


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Steps a second of steps with so many tokens.

    Sizes up to `padded_up_to` are those that programs are compiled for: a step between two of them
    costs what the larger one does. Between larger ones costs are interpolated, beyond the last
    extrapolated, both linearly in seconds. A step is never cheaper than a smaller one: where a
    measurement says so, the smaller one's time counts.

    Raises ValueError for what cannot be such a table.
    """

    tokens: tuple[int, ...]
    steps_per_sec: tuple[float, ...]
    padded_up_to: int = 0  # 0: no size is padded

    def __post_init__(self):
        sizes, rates = self.tokens, self.steps_per_sec
        if len(sizes) != len(rates):
            raise ValueError(f"{len(sizes)} tokens and {len(rates)} steps_per_sec are not as many")
        if len(sizes) < 2:
            raise ValueError(f"tokens={list(sizes)} are too few: two sizes make a table")
        if not all(_is_whole(size) for size in sizes) or sizes[0] < 1:
            raise ValueError(f"tokens={list(sizes)} are not positive whole numbers")
        if any(a >= b for a, b in pairwise(sizes)):
            raise ValueError(f"tokens={list(sizes)} do not increase strictly")
        if not all(_is_number(rate) and 0 < rate < math.inf for rate in rates):
            raise ValueError(f"steps_per_sec={list(rates)} are not positive numbers")
        if self.padded_up_to != 0 and self.padded_up_to not in sizes:
            raise ValueError(f"padded_up_to={self.padded_up_to} is none of tokens={list(sizes)}")

    def seconds(self, num_tokens: int) -> float:
        """The time of a step with that many tokens; of none at all it is 0."""
        if num_tokens not in self._known:
            self._known[num_tokens] = self._seconds(num_tokens)
        return self._known[num_tokens]

    @cached_property
    def _known(self) -> dict[int, float]:
        return {0: 0.0}  # a plan asks for thousands of sizes, and for the same ones each step

    def _seconds(self, num_tokens: int) -> float:
        after = bisect_left(self.tokens, num_tokens)
        if num_tokens <= self.padded_up_to or after == 0:
            return self._measured[after]
        after = min(after, len(self.tokens) - 1)
        low, high = self.tokens[after - 1], self.tokens[after]
        below, above = self._measured[after - 1], self._measured[after]
        return below + (above - below) * (num_tokens - low) / (high - low)

    @cached_property
    def _measured(self) -> tuple[float, ...]:
        return tuple(accumulate((1 / rate for rate in self.steps_per_sec), max))


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """The two parts of a speculative step: `verify` by the tokens that the target runs, anchors,
    drafts and prompts together; `draft` by the drafts that are proposed, a block a sequence.
    """

    verify: CostTable
    draft: CostTable


def profile(
    step: Step,
    sizes: Sequence[int],
    *,
    repeats: int = 5,
    warmups: int = 2,
    padded_up_to: int = 0,
) -> CostTable:
    """Measures `step` at increasing sizes: the median of `repeats` runs, after those to warm up.

    Sizes take turns, so that a clock that slows down slows all of them. The step's work has to be
    the same each time, and its context as long as those that will be served.

    Raises ValueError for a number of runs that measures nothing and for a time that is none.
    """
    if repeats < 1 or warmups < 0:
        raise ValueError(f"repeats={repeats}, warmups={warmups}: at least 1 and 0 are needed")
    rounds = [[_timed(step, size) for size in sizes] for _ in range(warmups + repeats)]
    times = [median(column) for column in zip(*rounds[warmups:], strict=True)]
    return CostTable(
        tokens=tuple(sizes),
        steps_per_sec=tuple(1 / time for time in times),
        padded_up_to=padded_up_to,
    )


def read_costs(path: Path | str) -> StepCosts:
    """Reads `{"verify": table, "draft": table}`, where a table is
    `{"tokens": [..], "steps_per_sec": [..]}` with `padded_up_to` or without.

    Raises ValueError, with the file's name, for anything else; OSError if it cannot be read.
    """
    try:
        content = json.loads(Path(path).read_text("utf-8"))
        _check_keys(content, needed={"verify", "draft"})
        return StepCosts(**{name: _table(name, content[name]) for name in ("verify", "draft")})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def write_costs(path: Path | str, costs: StepCosts) -> None:
    """Writes what `read_costs` reads."""
    Path(path).write_text(json.dumps(asdict(costs), indent=1) + "\n", "utf-8")


def _timed(step: Step, size: int) -> float:
    seconds = step(size)
    if not 0 < seconds < math.inf:
        raise ValueError(f"a step of {size} tokens took {seconds} seconds: that is no time")
    return seconds


def _table(name: str, content: Any) -> CostTable:
    try:
        _check_keys(content, needed={"tokens", "steps_per_sec"}, known={"padded_up_to"})
        lists = {key: content[key] for key in ("tokens", "steps_per_sec")}
        for key, value in lists.items():
            if not isinstance(value, list):
                raise ValueError(f"{key} is {value!r} and no list")
        tuples = {key: tuple(value) for key, value in lists.items()}
        return CostTable(**tuples, padded_up_to=content.get("padded_up_to", 0))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _check_keys(content: Any, needed: set[str], known: Iterable[str] = ()) -> None:
    if not isinstance(content, Mapping):
        raise ValueError(
            f"{type(content).__name__} is not an object of {' and '.join(sorted(needed))}"
        )
    missing, unknown = needed - content.keys(), content.keys() - needed - set(known)
    if missing:
        raise ValueError(f"{', '.join(sorted(missing))} is missing")
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))} is not known here")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
