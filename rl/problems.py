"""Short families of generated problems: sums, differences, products, chains and small stories.

A family is a function from a `Draw` to a `Draft`. Difficulty is mixed on purpose, from one-digit
sums to two-digit products: the bundled model is meant to solve about half of them before
reinforcement learning.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rl.worked import STEP, worked_difference, worked_product, worked_sum

Choice = TypeVar("Choice")

NAMES = (
    *("Ann", "Bob", "Sam", "Tom", "Max", "Eva", "Leo", "Mia"),
    *("Zoe", "Kim", "Ben", "Ida", "Jan", "Amy", "Dan", "Liz"),
)
THINGS = ("pens", "cups", "eggs", "nuts", "figs", "keys", "hats", "bags", "toys", "books")

SUM_PHRASES = (
    "{a}+{b}=?",
    "What is {a}+{b}?",
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "Add {a} and {b}.",
)
DIFFERENCE_PHRASES = (
    "{a}-{b}=?",
    "What is {a}-{b}?",
    "What is {a} - {b}?",
    "What is {a} minus {b}?",
    "Subtract {b} from {a}.",
)
PRODUCT_PHRASES = (
    "{a}*{b}=?",
    "What is {a}*{b}?",
    "What is {a} * {b}?",
    "What is {a} times {b}?",
    "Multiply {a} by {b}.",
)
BY_DIGIT = ((1, 1), (1, 2), (2, 1), (1, 2), (2, 1))  # digits of the factors
CHAIN_PHRASES = ("{a}=?", "What is {a}?")
SUM_STORIES = (
    "{n} has {a} {t} and buys {b} more. How many {t} does {n} have now?",
    "{n} has {a} {t} and {m} has {b}. How many {t} do they have together?",
    "{n} has {a} {t}. {m} has {b} more than {n}. How many {t} does {m} have?",
    "There are {a} {t} in one box and {b} in the other. How many {t} are there?",
)
DIFFERENCE_STORIES = (
    "{n} has {a} {t} and gives {b} to {m}. How many {t} are left?",
    "{n} has {a} {t}. {m} has {b} less than {n}. How many {t} does {m} have?",
    "{n} has {a} {t} and {m} has {b}. How many more {t} does {n} have?",
    "There are {a} {t} in the box. {n} takes {b}. How many {t} are left?",
)
PRODUCT_STORIES = (
    "There are {a} boxes with {b} {t} in each box. How many {t} are there?",
    "{n} has {a} bags with {b} {t} in each bag. How many {t} does {n} have?",
    "{a} {t} cost {b} coins each. How many coins do the {t} cost?",
)
GIFT_STORIES = (
    "{n} has {a} boxes with {b} {t} in each box and gives {c} {t} to {m}. How many are left?",
    "There are {a} bags with {b} {t} in each bag. {n} takes {c} {t}. How many are left?",
)


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A problem before its split is known. `key` names the operation and its operands, whatever
    the wording.
    """

    key: str
    question: str
    thought: str
    answer: int


class Draw:
    """Seeded choices built on `Random.random` alone, whose sequence Python promises to keep
    between versions.
    """

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def fraction(self) -> float:
        return self._random.random()

    def between(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included."""
        return low + int(self._random.random() * (high - low + 1))

    def pick(self, choices: Sequence[Choice]) -> Choice:
        return choices[self.between(0, len(choices) - 1)]

    def two(self, choices: Sequence[Choice]) -> tuple[Choice, Choice]:
        """Two different choices."""
        first = self.between(0, len(choices) - 1)
        second = self.between(0, len(choices) - 2)
        return choices[first], choices[second + (second >= first)]

    def number(self, digits: int) -> int:
        """A number of exactly `digits` digits; 1 to 9 for one."""
        return self.between(10 ** (digits - 1), 10**digits - 1)


def sum_key(*terms: int) -> str:
    """The same for all orders of the terms, so that 2+3 is not held out while 3+2 is trained on."""
    return "+".join(map(str, sorted(terms)))


def difference_key(a: int, b: int) -> str:
    return f"{a}-{b}"


def product_key(a: int, b: int) -> str:
    return f"{min(a, b)}*{max(a, b)}"


def sum_problem(draw: Draw) -> Draft:
    a, b = (draw.number(draw.pick((1, 2, 2, 2, 3, 3))) for _ in range(2))
    return _sum_draft(draw.pick(SUM_PHRASES).format(a=a, b=b), a, b)


def difference_problem(draw: Draw) -> Draft:
    b, a = sorted(draw.number(draw.pick((1, 2, 2, 2, 3, 3))) for _ in range(2))
    return _difference_draft(draw.pick(DIFFERENCE_PHRASES).format(a=a, b=b), a, b)


def product_problem(draw: Draw) -> Draft:
    return _product_of(draw, (*BY_DIGIT, (2, 2), (2, 2)))


def digit_product_problem(draw: Draw) -> Draft:
    """The products that have a factor of one digit."""
    return _product_of(draw, BY_DIGIT)


def chain_problem(draw: Draw) -> Draft:
    """Two or three operations worked one after the other: `3*4+5*6`, `12+35-8`, `(3+4)*6`."""
    return _chain_draft(draw, draw.pick((_running_total, _two_products, _bracket)))


def two_products_problem(draw: Draw) -> Draft:
    """The chains that add or subtract two products of one-digit factors."""
    return _chain_draft(draw, _two_products)


def story_problem(draw: Draw) -> Draft:
    kind = draw.pick((_sum_story, _difference_story, _product_story, _gift_story))
    n, m = draw.two(NAMES)
    return kind(draw, {"n": n, "m": m, "t": draw.pick(THINGS)})


SHORT_FAMILIES: dict[str, Callable[[Draw], Draft]] = {
    "sum": sum_problem,
    "difference": difference_problem,
    "product": product_problem,
    "chain": chain_problem,
    "story": story_problem,
}

# Parts of those families, asked for by name alone: what reinforcement learning can lift.
NARROW_FAMILIES: dict[str, Callable[[Draw], Draft]] = {
    "digit_product": digit_product_problem,
    "two_products": two_products_problem,
}


def _sum_draft(question: str, a: int, b: int) -> Draft:
    return Draft(key=sum_key(a, b), question=question, thought=worked_sum(a, b), answer=a + b)


def _difference_draft(question: str, a: int, b: int) -> Draft:
    return Draft(
        key=difference_key(a, b),
        question=question,
        thought=worked_difference(a, b),
        answer=a - b,
    )


def _product_draft(question: str, a: int, b: int) -> Draft:
    return Draft(
        key=product_key(a, b), question=question, thought=worked_product(a, b), answer=a * b
    )


def _product_of(draw: Draw, digits: Sequence[tuple[int, int]]) -> Draft:
    digits_a, digits_b = draw.pick(digits)
    a, b = draw.number(digits_a), draw.number(digits_b)
    return _product_draft(draw.pick(PRODUCT_PHRASES).format(a=a, b=b), a, b)


def _chain_draft(draw: Draw, chain: Callable[[Draw], tuple[str, list[str], int]]) -> Draft:
    text, steps, answer = chain(draw)
    question = draw.pick(CHAIN_PHRASES).format(a=text)
    return Draft(key=text, question=question, thought=STEP.join(steps), answer=answer)


def _running_total(draw: Draw) -> tuple[str, list[str], int]:
    total = draw.between(1, 49)
    text, steps = str(total), []
    for _ in range(draw.between(2, 3)):
        term = draw.between(1, 20)
        sign = draw.pick("+-") if total >= term else "+"
        result = total + term if sign == "+" else total - term
        steps.append(f"{total}{sign}{term}={result}")
        text, total = f"{text}{sign}{term}", result
    return text, steps, total


def _two_products(draw: Draw) -> tuple[str, list[str], int]:
    a, b, c, d = (draw.between(2, 9) for _ in range(4))
    first, second = a * b, c * d
    sign = draw.pick("+-") if first >= second else "+"
    answer = first + second if sign == "+" else first - second
    steps = [f"{a}*{b}={first}", f"{c}*{d}={second}", f"{first}{sign}{second}={answer}"]
    return f"{a}*{b}{sign}{c}*{d}", steps, answer


def _bracket(draw: Draw) -> tuple[str, list[str], int]:
    a, b, c = draw.between(2, 20), draw.between(2, 9), draw.between(2, 5)
    total = a + b
    return f"({a}+{b})*{c}", [f"{a}+{b}={total}", f"{total}*{c}={total * c}"], total * c


def _sum_story(draw: Draw, words: dict[str, str]) -> Draft:
    a, b = draw.between(2, 99), draw.between(2, 99)
    return _sum_draft(draw.pick(SUM_STORIES).format(a=a, b=b, **words), a, b)


def _difference_story(draw: Draw, words: dict[str, str]) -> Draft:
    b, a = sorted((draw.between(2, 99), draw.between(2, 99)))
    return _difference_draft(draw.pick(DIFFERENCE_STORIES).format(a=a, b=b, **words), a, b)


def _product_story(draw: Draw, words: dict[str, str]) -> Draft:
    a, b = draw.between(2, 9), draw.between(2, 30)
    return _product_draft(draw.pick(PRODUCT_STORIES).format(a=a, b=b, **words), a, b)


def _gift_story(draw: Draw, words: dict[str, str]) -> Draft:
    """Two steps: boxes times pieces, less what is given away."""
    a, b = draw.between(2, 9), draw.between(2, 9)
    c = draw.between(2, a * b)
    thought = STEP.join((worked_product(a, b), worked_difference(a * b, c)))
    question = draw.pick(GIFT_STORIES).format(a=a, b=b, c=c, **words)
    return Draft(key=f"{a}*{b}-{c}", question=question, thought=thought, answer=a * b - c)
