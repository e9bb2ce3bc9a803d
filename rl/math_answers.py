"""The final answer of a worked solution, and whether it is the right one.

Whole numbers are compared here; everything else by math-verify, whose own time limits are off: they
work by signals, which raise outside the main thread. It runs in a worker process that can be killed
(`rl.grading`), since some answers take it minutes (spec/rl 6.2).
"""

import re
from functools import lru_cache

BOXES = ("\\boxed{", "\\fbox{")
ANSWER = re.compile(r"answer\s*(?:is)?\s*:\s*([^\n]+)", re.IGNORECASE)
INTEGER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)", re.ASCII)
MOST_DIGITS = 100  # of a number compared as such; Python refuses to read 4,300


def final_answer(text: str) -> str | None:
    """What is in the last box, else on the last line `Answer: ...`, else None.

    Of several boxes the last alone counts: math-verify would make a set of them.
    """
    boxed = _last_box(text)
    if boxed is not None:
        return _bare(boxed)
    lines = ANSWER.findall(text)
    return _bare(lines[-1]) if lines else None


def same_answer(found: str, right: str) -> bool:
    """Whether two answers are the same number or expression; errors of math-verify come through."""
    numbers = [_integer(_bare(text)) for text in (found, right)]
    if None not in numbers:
        return numbers[0] == numbers[1]
    return _verified(found, _bare(right))


def check_math_verify() -> None:
    """Raises ValueError when the package that compares expressions is not there."""
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "the reward 'math' needs math-verify: pip install 'minimax-jax[math]'"
        ) from error


@lru_cache(maxsize=4096)
def _verified(found: str, right: str) -> bool:
    from math_verify import parse, verify

    gold, target = (
        parse(f"\\boxed{{{text}}}", parsing_timeout=None, raise_on_error=True)  # pyright: ignore
        for text in (right, found)
    )
    return bool(gold and target) and verify(gold, target, timeout_seconds=None, raise_on_error=True)


def _last_box(text: str) -> str | None:
    """The contents of the last box whose braces match."""
    start = max(text.rfind(box) for box in BOXES)
    while start >= 0:
        first = text.index("{", start) + 1
        depth = 1
        for place in range(first, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[first:place]
        start = max(text.rfind(box, 0, start) for box in BOXES)
    return None


def _bare(text: str) -> str:
    """Without what is set around a number: dollars, a last stop, `\\text{}`, thin spaces."""
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text.strip())
    text = text.replace("\\!", "").replace("\\,", "").replace("{,}", ",")
    return text.strip().removesuffix(".").strip("$* ").strip()


def _integer(text: str) -> int | None:
    if len(text) > MOST_DIGITS or not INTEGER.fullmatch(text):
        return None
    return int(text.replace(",", ""))
