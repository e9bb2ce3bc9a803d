"""Generated arithmetic with worked thoughts, for training the small model and for measuring it.

`problem_at(index, split, seed=...)` is random access in constant time, so a position in the data is
one integer and a resumed run continues exactly; `dialogue_at` asks on about the same ledger. Train
and held-out problems are disjoint by a hash of the operation and its operands, whatever the wording
or the family: a sum held out is never trained on inside a story either.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rl.ledger import LINES, MOST_QUESTIONS, ledger_dialogue
from rl.problems import NARROW_FAMILIES, SHORT_FAMILIES, Draft, Draw

TRAIN, HELD_OUT = "train", "held_out"
SPLITS = (TRAIN, HELD_OUT)
# Rendered prompt and answer of a short problem fit 128 tokens, thought and answer 48.
SHORT = tuple(SHORT_FAMILIES)
NARROW = tuple(NARROW_FAMILIES)
LEDGERS = tuple(LINES)
FAMILIES = SHORT + NARROW + LEDGERS
_OF_ONE_QUESTION = SHORT_FAMILIES | NARROW_FAMILIES
# One problem in ten is held out.
HELD_OUT_EVERY = 10


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A question, the worked thought and the answer, a plain integer in decimal."""

    question: str
    thought: str
    answer: str
    family: str
    key: str


def problem_at(
    index: int, split: str = TRAIN, *, seed: int = 0, families: Sequence[str] = SHORT
) -> Problem:
    """Problem number `index` of a split: a function of its arguments alone.

    Families are drawn evenly from `families`; one named twice comes twice as often.
    """
    _check(index, split, families)
    return _dialogue(index, split, seed, families, most_questions=1)[0]


def dialogue_at(
    index: int, split: str = TRAIN, *, seed: int = 0, families: Sequence[str] = SHORT
) -> list[Problem]:
    """Dialogue number `index` of a split: several questions about one ledger, each to be asked
    after the answers before it; or a single short problem.
    """
    _check(index, split, families)
    return _dialogue(index, split, seed, families, most_questions=None)


def problems(
    split: str = TRAIN,
    *,
    count: int,
    start: int = 0,
    seed: int = 0,
    families: Sequence[str] = SHORT,
) -> Iterator[Problem]:
    """Problems number `start` to `start + count - 1`."""
    for index in range(start, start + count):
        yield problem_at(index, split, seed=seed, families=families)


def split_of(key: str) -> str:
    """The split that owns an operation and its operands; the same on every machine and for every
    seed.
    """
    return HELD_OUT if _hash(key) % HELD_OUT_EVERY == 0 else TRAIN


def prompt_messages(problem: Problem) -> list[dict[str, str]]:
    """The chat that asks the question."""
    return [{"role": "user", "content": problem.question}]


def messages(*turns: Problem) -> list[dict[str, str]]:
    """The chat with its answered turns, for supervised training."""
    chat = []
    for problem in turns:
        answer = {"role": "assistant", "reasoning": problem.thought, "content": problem.answer}
        chat += [*prompt_messages(problem), answer]
    return chat


def exact_match(problem: Problem, content: str | None) -> bool:
    """Whether an answer, its surrounding whitespace aside, is the number asked for."""
    return content is not None and content.strip() == problem.answer


def _dialogue(
    index: int, split: str, seed: int, families: Sequence[str], most_questions: int | None
) -> list[Problem]:
    """`most_questions` is the family's own where it is None."""
    draw = Draw(_hash(f"{seed}/{split}/{index}"))
    family = draw.pick(families)
    make = _OF_ONE_QUESTION.get(family)
    if make is not None:
        drafts = [make(draw)]
        while split_of(drafts[0].key) != split:
            drafts = [make(draw)]
    else:
        most = most_questions or MOST_QUESTIONS[family]
        drafts = ledger_dialogue(draw, family, most, lambda key: split_of(key) == split)
    return [_problem(draft, family) for draft in drafts]


def _problem(draft: Draft, family: str) -> Problem:
    return Problem(
        question=draft.question,
        thought=draft.thought,
        answer=str(draft.answer),
        family=family,
        key=draft.key,
    )


def _check(index: int, split: str, families: Sequence[str]) -> None:
    if index < 0:
        raise ValueError(f"a problem's index must be at least 0, got {index}")
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: use {' or '.join(SPLITS)}")
    unknown = [family for family in families if family not in FAMILIES]
    if unknown or not families:
        raise ValueError(f"unknown families {unknown}: name some of {', '.join(FAMILIES)}")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
