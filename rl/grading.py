"""Rewards of many answers, with what went wrong counted: a reward that raises, hangs or is not a
number gives the sample no reward, never a wrong one in silence.

With workers the rewards run in processes of their own, which are killed at the time limit; a
function must then be one that a process can import. Without, they run in a thread of this one, and
nothing can stop one that hangs.
"""

import math
import multiprocessing
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from numbers import Real

import pebble

from rl.questions import Question
from rl.rewards import Answer, RewardFn

TASKS_A_WORKER = 1000  # then it is replaced, so that what it leaks is bounded
Asked = Sequence[tuple[Question, Answer]]


@dataclass(frozen=True, kw_only=True)
class Grades:
    """A reward for each answer, NaN where there is none, and the faults by kind with one example
    each.
    """

    rewards: list[float]
    faults: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)


class Grader:
    """Calls a reward function on many answers; use as a context manager."""

    def __init__(self, reward: RewardFn, workers: int, seconds: float):
        self._reward, self._seconds = reward, seconds
        self._threads = None if workers else ThreadPoolExecutor(1)
        # spawned, since a fork of a process that runs JAX's threads may hang
        context = multiprocessing.get_context("spawn")
        self._processes = (
            pebble.ProcessPool(workers, max_tasks=TASKS_A_WORKER, context=context)
            if workers
            else None
        )

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *_: object) -> None:
        if self._threads is not None:
            self._threads.shutdown()
        if self._processes is not None:
            self._processes.stop()
            self._processes.join()

    def grade(self, asked: Asked) -> Grades:
        """The rewards in the order of the answers."""
        grades = Grades(rewards=[])
        futures = [self._submit(question, answer) for question, answer in asked]
        for future, (question, answer) in zip(futures, asked, strict=True):
            fault = _fault(future)
            grades.rewards.append(math.nan if fault else float(future.result()))
            if fault is not None:
                kind, text = fault
                grades.faults[kind] += 1
                where = f"{text} (answer {answer.text[:80]!r} to {question.answer!r})"
                grades.examples.setdefault(kind, where)
        return grades

    def _submit(self, question: Question, answer: Answer) -> Future:
        if self._threads is not None:
            return self._threads.submit(self._reward, question, answer)
        assert self._processes is not None
        arguments = (question, answer)
        return self._processes.schedule(self._reward, args=arguments, timeout=self._seconds)


def _fault(future: Future) -> tuple[str, str] | None:
    """What kind of fault a reward ended in, and in which words."""
    error = future.exception()
    if isinstance(error, TimeoutError):
        return "timeout", "the reward took too long"
    if error is not None:
        return "error", f"the reward raised {type(error).__name__}: {error}"
    value = future.result()
    if not isinstance(value, Real) or not math.isfinite(value):
        return "error", f"the reward is {value!r}, which is no finite number"
    return None
