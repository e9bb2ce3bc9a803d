"""Thought and content of a finished text, decided from the end of the rendered prompt."""

import pytest

from minimax_jax.chat import ChatTemplate, split_reasoning
from minimax_jax.chat.reasoning import starts_in_reasoning
from tests.chat.folders import TINY

ENABLED = "]~b]ai\n<mm:think>"
DISABLED = "]~b]ai\n</mm:think>"
ADAPTIVE = "]~b]ai\n"


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        # The opening tag may stand in the text, in the prompt, or in both.
        (ADAPTIVE, "<mm:think>a</mm:think>b", "a", "b"),
        (ENABLED, "a</mm:think>b", "a", "b"),
        (ENABLED, "<mm:think>a</mm:think>b", "a", "b"),
        # Without markers all is content, unless the prompt opened the thought.
        (ADAPTIVE, "Hello", None, "Hello"),
        (DISABLED, "Hello", None, "Hello"),
        (ENABLED, "cut by max_tokens", "cut by max_tokens", None),
        (ADAPTIVE, "<mm:think>cut", "cut", None),
        # A leading closer says "no thought"; later ones without an opener stay.
        (ADAPTIVE, "</mm:think>Hello", None, "Hello"),
        (ADAPTIVE, "\n</mm:think>Hello", None, "Hello"),
        (DISABLED, "</mm:think>Hello", None, "Hello"),
        (ADAPTIVE, "a</mm:think>b", None, "a</mm:think>b"),
        (ENABLED, "a</mm:think>b</mm:think>c", "a", "b</mm:think>c"),
        # Text before the thought is content.
        (ADAPTIVE, "x<mm:think>a</mm:think>b", "a", "xb"),
        # Nothing said is None, nothing thought between two tags is "".
        (ENABLED, "a</mm:think>", "a", None),
        (ENABLED, "</mm:think>b", "", "b"),
        (ENABLED, "", "", None),
        (ADAPTIVE, "", None, None),
        # White space is part of the text.
        (ENABLED, " a \n</mm:think>\n b ", " a \n", "\n b "),
    ],
)
def test_split(prompt, text, reasoning, content):
    assert split_reasoning(text, prompt) == (reasoning, content)


def test_state_comes_from_the_end_of_the_prompt_alone():
    template = ChatTemplate.load(TINY)
    system = {"role": "system", "content": "Write <mm:think>thought</mm:think>answer."}
    prompt = template.render([system, {"role": "user", "content": "why?"}])
    assert split_reasoning("why</mm:think>42", prompt) == ("why", "42")


def test_open_marker_quoted_by_the_user_starts_no_thought():
    template = ChatTemplate.load(TINY)
    quoted = [{"role": "user", "content": "What is <mm:think>"}]
    assert split_reasoning("A tag.", template.render(quoted, thinking_mode="disabled")) == (
        None,
        "A tag.",
    )


def test_white_space_after_the_marker_does_not_hide_it():
    assert starts_in_reasoning(ENABLED + "\n")
    assert not starts_in_reasoning(DISABLED)
