"""Which implementation of an op runs: the first of its table that does not refuse, or the one asked
for by name.

A refusal is a sentence. When every implementation refuses, the caller gets all the sentences at
once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


def accepts(*args: Any, **options: Any) -> None:
    """The `refuse` of an implementation that is right for every input."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op; `refuse` gets the op's arguments and returns a sentence, or None if
    it can run them.
    """

    name: str
    run: Callable[..., Any]
    refuse: Callable[..., str | None] = accepts


def choose(
    table: Sequence[Implementation], name: str | None, *args: Any, **options: Any
) -> Implementation:
    """The implementation for these arguments. Raises ValueError when the named one, or every one,
    refuses.
    """
    candidates = [one for one in table if name in (None, one.name)]
    if not candidates:
        known = ", ".join(one.name for one in table)
        raise ValueError(f"implementation {name!r} is not one of {known}")
    refusals = []
    for one in candidates:
        reason = one.refuse(*args, **options)
        if reason is None:
            return one
        refusals.append(f"{one.name}: {reason}")
    raise ValueError("no implementation takes these arguments: " + "; ".join(refusals))


def explain(table: Sequence[Implementation], *args: Any, **options: Any) -> str:
    """One line an implementation: what it says to these arguments, the one that would run first."""
    answers = [(one.name, one.refuse(*args, **options)) for one in table]
    return "\n".join(f"{name}: {reason or 'runs'}" for name, reason in answers)
