"""Rewards: plain functions from a question and an answer to a number, and what is added for the
answer's form and length (spec/rl 1.9, 1.10, 6.2).

The two that come with the project say 1.0 for right and 0.0 for wrong; an answer that was cut off
is wrong. A user's own function may return any finite number; above 0 counts as right in the
accuracy.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rl.math_answers import final_answer, same_answer
from rl.questions import Question


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model answered: the text after its thought, and the thought (None: it had none)."""

    text: str
    thought: str | None
    num_tokens: int
    finished: bool  # by itself, not at the longest length


RewardFn = Callable[[Question, Answer], float]


def arithmetic(question: Question, answer: Answer) -> float:
    """Whether the text, its surrounding whitespace aside, is the number asked for."""
    return float(answer.finished and answer.text.strip() == question.answer)


def mathematics(question: Question, answer: Answer) -> float:
    """Whether the last box, or the last line `Answer: ...`, is the right answer."""
    found = final_answer(answer.text) if answer.finished else None
    return float(found is not None and same_answer(found, question.answer))


REWARDS: dict[str, RewardFn] = {"arithmetic": arithmetic, "math": mathematics}


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """From a reward to the score that advantages are made of."""

    plus_minus_one: bool  # 1 and 0 become 1 and -1
    format_score: float  # for a thought that was closed and an answer after it
    overlong_tokens: int  # the last tokens of the longest length, over which the score falls
    overlong_penalty: float  # at the longest length
    max_tokens: int  # the longest length

    def score(self, reward: float, answer: Answer) -> float:
        """The whole score."""
        score = 2 * reward - 1 if self.plus_minus_one else reward
        return score + self.format_score * has_form(answer) - self.overlong(answer.num_tokens)

    def overlong(self, num_tokens: int) -> float:
        """0 up to `max_tokens - overlong_tokens`, from there on linear to the penalty (DAPO)."""
        if not self.overlong_tokens:
            return 0.0
        over = num_tokens - (self.max_tokens - self.overlong_tokens)
        return max(0.0, over / self.overlong_tokens) * self.overlong_penalty


def has_form(answer: Answer) -> bool:
    """Whether a closed thought comes before an answer, and the answer ended by itself."""
    return answer.finished and bool(answer.thought) and bool(answer.text.strip())
