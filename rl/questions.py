"""What is asked in reinforcement learning: chats with a known answer, by number, so that a position
in the data is one integer and a resumed run asks exactly what it would have asked.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from rl.data import HELD_OUT, SHORT, TRAIN, Problem, problem_at, prompt_messages
from rl.math_files import Row, read_rows

ARITHMETIC = "arithmetic"
# Chats of files that hold bare problems end with this; those that hold chats stay as they are.
INSTRUCTION = "Think step by step, and put the final answer alone into \\boxed{}."


@dataclass(frozen=True, kw_only=True)
class Question:
    """A chat to be answered, the right answer as text, and the set that it is from."""

    messages: tuple[dict[str, str], ...]
    answer: str
    source: str


@runtime_checkable
class Questions(Protocol):
    """Endless questions by number."""

    @property
    def identity(self) -> str:
        """Equal for equal data: what a resumed run may not change."""
        ...

    def at(self, index: int) -> Question:
        """Question number `index`, from 0 on; a function of the number alone."""
        ...


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """Generated problems of one split; a family that is named twice comes twice as often."""

    split: str
    seed: int
    families: tuple[str, ...] = SHORT

    def __post_init__(self) -> None:
        self.at(0)  # refuses families that there are not

    @property
    def identity(self) -> str:
        return f"{ARITHMETIC}/{self.split}/{self.seed}/{','.join(self.families)}"

    def at(self, index: int) -> Question:
        return of_problem(problem_at(index, self.split, seed=self.seed, families=self.families))


@dataclass(frozen=True, kw_only=True)
class Shuffled:
    """Questions of a file, epoch after epoch, each in an order of its own."""

    questions: Sequence[Question]
    seed: int
    _order: Callable[[int], np.ndarray] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_order", lru_cache(maxsize=2)(self._permutation))

    @property
    def identity(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for question in self.questions:
            digest.update(repr((question.messages, question.answer)).encode())
        return f"{len(self.questions)} questions {digest.hexdigest()}, order {self.seed}"

    def at(self, index: int) -> Question:
        epoch, place = divmod(index, len(self.questions))
        return self.questions[self._order(epoch)[place]]

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(
            len(self.questions)
        )


def of_problem(problem: Problem) -> Question:
    """A generated problem as a question."""
    messages = tuple(prompt_messages(problem))
    return Question(messages=messages, answer=problem.answer, source=ARITHMETIC)


def training_questions(data: str, seed: int) -> Questions:
    """`arithmetic`, `arithmetic:sum,chain,chain` (some families), or those of a file
    (`rl.math_files`). Raises ValueError for a file that holds none, and for no such family.
    """
    families = _families(data)
    if families:
        return Arithmetic(split=TRAIN, seed=seed, families=families)
    return Shuffled(questions=file_questions(Path(data)), seed=seed)


def measured_questions(data: str, count: int) -> list[Question]:
    """Held-out arithmetic, or the first questions of a file."""
    families = _families(data)
    if families:
        held_out = Arithmetic(split=HELD_OUT, seed=0, families=families)
        return [held_out.at(index) for index in range(count)]
    return file_questions(Path(data))[:count]


def file_questions(path: Path) -> list[Question]:
    """All questions of a file in its order, each once."""
    return [_of_row(row, path.stem) for row in read_rows(path)]


def _families(data: str) -> tuple[str, ...]:
    """The families of generated arithmetic that are meant; none for a file."""
    name, _, families = data.partition(":")
    if name != ARITHMETIC:
        return ()
    return tuple(families.split(",")) if families else SHORT


def _of_row(row: Row, source: str) -> Question:
    messages = row.messages
    if messages is None:
        messages = ({"role": "user", "content": f"{row.problem}\n\n{INSTRUCTION}"},)
    return Question(messages=messages, answer=row.answer, source=row.source or source)
