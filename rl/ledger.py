"""Ledger families: questions about one or two lines of a ledger, lost among many others.

The needed numbers lie up to about 1,800 tokens, or some 110 blocks of 16, back, so a
sparse-attention model answers only if its index picks the right blocks. The thought first copies
the needed lines, then works on their numbers. A dialogue asks several questions about one ledger,
so that a long context teaches as much as many short ones.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from rl.problems import NAMES, THINGS, Draft, Draw, difference_key, sum_key
from rl.worked import worked_difference, worked_sum

# Lines of a family's ledgers, drawn evenly on a logarithmic scale; a line is 4 to 8 tokens.
LINES = {"list": (4, 16), "ledger": (8, 50), "long": (50, 240)}
# Most questions of a dialogue; never more than half the lines.
MOST_QUESTIONS = {"list": 4, "ledger": 6, "long": 6}
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

    @property
    def pair(self) -> tuple[str, str]:
        return self.name, self.thing

    def line(self) -> str:
        return f"- {self.name} {self.thing}: {self.count}"


class Lookup(NamedTuple):
    """A question, the entries it needs, and the work on their numbers ("" if none is left)."""

    key: str
    question: str
    needed: tuple[Entry, ...]
    work: str
    answer: int


def ledger_dialogue(
    draw: Draw, family: str, most_questions: int, accept: Callable[[str], bool]
) -> list[Draft]:
    """Up to `most_questions` about one ledger, which stands in the first; only with keys that
    `accept` takes.
    """
    num_lines = _log_between(draw, *LINES[family])
    lookups = _lookups(draw, draw.between(1, min(most_questions, num_lines // 2)), accept)
    needed = [entry for lookup in lookups for entry in lookup.needed]
    lines = _ledger_lines(draw, needed, num_lines)
    question = lookups[0].question
    first = draw.fraction() < QUESTION_FIRST_SHARE
    opening = "\n".join([question, *lines] if first else [*lines, question])
    questions = [opening, *(lookup.question for lookup in lookups[1:])]
    return [_draft(*asked) for asked in zip(questions, lookups, strict=True)]


def _lookups(draw: Draw, count: int, accept: Callable[[str], bool]) -> list[Lookup]:
    """Accepted ones that need no entry twice."""
    lookups: list[Lookup] = []
    taken: set[tuple[str, str]] = set()
    while len(lookups) < count:
        lookup = draw.pick((_count, _together, _two_things, _difference))(draw)
        pairs = {entry.pair for entry in lookup.needed}
        if accept(lookup.key) and taken.isdisjoint(pairs):
            lookups.append(lookup)
            taken |= pairs
    return lookups


def _draft(question: str, lookup: Lookup) -> Draft:
    copied = [entry.line() for entry in lookup.needed]
    thought = "\n".join([*copied, lookup.work] if lookup.work else copied)
    return Draft(key=lookup.key, question=question, thought=thought, answer=lookup.answer)


def _ledger_lines(draw: Draw, needed: list[Entry], num_lines: int) -> list[str]:
    """The needed entries among others and notes, in random order."""
    taken = {entry.pair for entry in needed}
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
