"""Long families: a question about one or two lines of a ledger, lost among many others.

The needed numbers lie up to about 1,900 tokens, or some 115 blocks of 16, back, so a
sparse-attention model answers only if its index picks the right blocks. The thought first copies
the needed lines, then works on their numbers.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from rl.problems import NAMES, THINGS, Draft, Draw, difference_key, sum_key
from rl.worked import worked_difference, worked_sum

# Lines of a ledger, drawn evenly on a logarithmic scale; a line is 4 to 8 tokens.
LEDGER_LINES = (8, 50)
LONG_LINES = (50, 268)
NOTE_SHARE = 0.3
QUESTION_FIRST_SHARE = 0.2

NOTES = (
    "# {n} met {m}",
    "# {n} lost a box",
    "# {n} met {m} on day {x}",
    "# day {x}",
    "# {n} paid {x} coins",
)


class Entry(NamedTuple):
    """One line of the ledger; each pair of name and thing stands there once at most."""

    name: str
    thing: str
    count: int

    def line(self) -> str:
        return f"- {self.name} {self.thing}: {self.count}"


class Lookup(NamedTuple):
    """A question, the entries it needs, and the work on their numbers ("" if none is left)."""

    key: str
    question: str
    needed: tuple[Entry, ...]
    work: str
    answer: int


def ledger_problem(draw: Draw) -> Draft:
    """A ledger of some 60 to 350 tokens."""
    return _ledger_draft(draw, _log_between(draw, *LEDGER_LINES))


def long_problem(draw: Draw) -> Draft:
    """A ledger of some 350 to 1,900 tokens."""
    return _ledger_draft(draw, _log_between(draw, *LONG_LINES))


LONG_FAMILIES: dict[str, Callable[[Draw], Draft]] = {
    "ledger": ledger_problem,
    "long": long_problem,
}


def _ledger_draft(draw: Draw, num_lines: int) -> Draft:
    lookup = draw.pick((_count, _together, _two_things, _difference))(draw)
    lines = _ledger_lines(draw, lookup.needed, num_lines)
    first = draw.fraction() < QUESTION_FIRST_SHARE
    parts = [lookup.question, *lines] if first else [*lines, lookup.question]
    thought = "\n".join(
        [entry.line() for entry in lookup.needed] + [lookup.work] * bool(lookup.work)
    )
    return Draft(key=lookup.key, question="\n".join(parts), thought=thought, answer=lookup.answer)


def _ledger_lines(draw: Draw, needed: tuple[Entry, ...], num_lines: int) -> list[str]:
    """The needed entries among others and notes, in random order."""
    taken = {(entry.name, entry.thing) for entry in needed}
    pairs = [(name, thing) for name in NAMES for thing in THINGS if (name, thing) not in taken]
    num_others = num_lines - len(needed)
    num_entries = min(len(pairs), round(num_others * (1 - NOTE_SHARE)))
    others = [
        Entry(name, thing, _amount(draw)).line()
        for name, thing in _shuffled(draw, pairs)[:num_entries]
    ]
    notes = [_note(draw) for _ in range(num_others - num_entries)]
    return _shuffled(draw, [*(entry.line() for entry in needed), *others, *notes])


def _note(draw: Draw) -> str:
    n, m = draw.two(NAMES)
    return draw.pick(NOTES).format(n=n, m=m, x=draw.between(1, 99))


def _count(draw: Draw) -> Lookup:
    entry = Entry(draw.pick(NAMES), draw.pick(THINGS), _amount(draw))
    question = f"How many {entry.thing} does {entry.name} have?"
    return Lookup("/".join(map(str, entry)), question, (entry,), "", entry.count)


def _together(draw: Draw) -> Lookup:
    (n, m), thing = draw.two(NAMES), draw.pick(THINGS)
    question = f"How many {thing} do {n} and {m} have together?"
    return _sum_lookup(question, Entry(n, thing, _amount(draw)), Entry(m, thing, _amount(draw)))


def _two_things(draw: Draw) -> Lookup:
    name, (one, other) = draw.pick(NAMES), draw.two(THINGS)
    question = f"How many {one} and {other} does {name} have?"
    return _sum_lookup(question, Entry(name, one, _amount(draw)), Entry(name, other, _amount(draw)))


def _sum_lookup(question: str, first: Entry, second: Entry) -> Lookup:
    a, b = first.count, second.count
    return Lookup(sum_key(a, b), question, (first, second), worked_sum(a, b), a + b)


def _difference(draw: Draw) -> Lookup:
    (n, m), thing = draw.two(NAMES), draw.pick(THINGS)
    b, a = sorted((_amount(draw), _amount(draw)))
    question = f"How many more {thing} does {n} have than {m}?"
    needed = (Entry(n, thing, a), Entry(m, thing, b))
    return Lookup(difference_key(a, b), question, needed, worked_difference(a, b), a - b)


def _amount(draw: Draw) -> int:
    return draw.between(2, 99)


def _log_between(draw: Draw, low: int, high: int) -> int:
    return round(low * math.exp(draw.fraction() * math.log(high / low)))


def _shuffled(draw: Draw, items: list) -> list:
    items = list(items)
    for last in range(len(items) - 1, 0, -1):
        other = draw.between(0, last)
        items[last], items[other] = items[other], items[last]
    return items
