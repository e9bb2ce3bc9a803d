"""Splits a finished answer into thought and content (specification model 4.3).

Whether the text begins inside a thought is read from the end of the rendered prompt, never from a
request flag and never from markers further up, which may be quoted by a system message.
"""

from typing import NamedTuple

THINK_START = "<mm:think>"
THINK_END = "</mm:think>"


class Reply(NamedTuple):
    """What the model thought and what it said; None where there is none.

    `reasoning` is "" when the model closed its thought at once, so that the turn can be rendered
    back unchanged.
    """

    reasoning: str | None
    content: str | None


def split_reasoning(text: str, prompt: str) -> Reply:
    """The thought and the content of a finished `text` that followed `prompt`.

    A thought that was never closed (cut by max_tokens) is all reasoning, content None. Without
    markers in the prompt's end or in the text, all is content. Nothing is stripped and, the markers
    of one thought aside, nothing is lost.
    """
    if starts_in_reasoning(prompt):
        return _split_inside(text.removeprefix(THINK_START))
    return _split_outside(text)


def starts_in_reasoning(prompt: str) -> bool:
    """Whether the generation prompt has opened a thought: the rendered prompt ends with
    `<mm:think>`.
    """
    return prompt.rstrip().endswith(THINK_START)


def _split_inside(text: str) -> Reply:
    reasoning, _, content = text.partition(THINK_END)
    return Reply(reasoning, content or None)


def _split_outside(text: str) -> Reply:
    """Adaptive or disabled thinking: one leading closer is dropped, and the text may open a
    thought by itself.
    """
    if text.lstrip().startswith(THINK_END):
        text = text.lstrip().removeprefix(THINK_END)
    before, opened, rest = text.partition(THINK_START)
    if not opened:
        return Reply(None, text or None)
    reasoning, content = _split_inside(rest)
    return Reply(reasoning, (before + (content or "")) or None)
