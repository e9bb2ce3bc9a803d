"""Stop strings through the engine: where they are met, what is held back, and what goes first."""

import pytest

from tests.serving.engines import run, running
from tests.serving.grammars import tokenizer

DRAFTS = pytest.mark.parametrize("drafts", [0, 3])


def ended(text: str, *, drafts: int = 0, **options):
    """A sequence that writes the text; the engine's answer."""

    async def test():
        async with running(num_speculative_tokens=drafts) as it:
            whole = await it.text("r", text, **({"max_tokens": 100} | options))
            await it.idle()
            return whole

    return run(test)


@DRAFTS
def test_a_stop_string_across_tokens_ends_the_sequence_at_the_token_that_completes_it(drafts):
    whole = ended("one two three four", drafts=drafts, stop=("wo thr",))
    written = tokenizer().decode(whole.tokens)
    assert (whole.reason, whole.end.matched_stop) == ("stop", "wo thr")
    assert "wo thr" in written and "wo thr" not in tokenizer().decode(whole.tokens[:-1])


@DRAFTS
def test_what_may_be_a_stop_string_is_told_with_what_decides_it(drafts):
    whole = ended("ab STO STOP cd", drafts=drafts, stop=("STOP",))
    before = [token for part in whole.parts[:-1] for token in part.token_ids]
    assert "ab" in tokenizer().decode(before)
    assert tokenizer().decode(before).endswith(("STO", "STO "))
    assert tokenizer().decode(whole.end.token_ids).lstrip().startswith("STOP")


def test_nothing_is_lost_of_what_was_held_when_the_length_ends_it():
    whole = ended("ab STO", stop=("STOP",), max_tokens=len(tokenizer().encode("ab STO")))
    assert tokenizer().decode(whole.tokens) == "ab STO"
    assert (whole.reason, whole.end.matched_stop) == ("length", None)


def test_log_probabilities_are_held_with_their_tokens():
    """F138."""
    whole = ended("ab STO STOP cd", stop=("STOP",), logprobs=0)
    assert [entry[0] for entry in whole.logprobs()] == whole.tokens
    assert [entry[1] for entry in whole.logprobs()] == [
        -(5 + i) / 8 for i in range(len(whole.tokens))
    ]
    for part in whole.parts:
        assert part.logprobs is None or list(part.logprobs.token_ids) == list(part.token_ids)


def test_the_first_tokens_of_min_tokens_are_not_looked_at():
    text = "x x x x x x"
    count = len(tokenizer().encode(text))
    whole = ended(text, stop=("x",), min_tokens=count - 1)
    assert (len(whole.tokens), whole.end.matched_stop) == (count, "x")


def test_the_end_of_the_turn_is_no_text_and_goes_before_a_string_that_spells_it():
    whole = ended("ab", stop=("[e~[",))
    assert (whole.reason, whole.end.matched_stop) == ("stop", None)


@DRAFTS
def test_a_stop_string_goes_before_a_stop_token_behind_it(drafts):
    ids = tokenizer().encode("ab cd ef gh")
    whole = ended("ab cd ef gh", drafts=drafts, stop=("cd",), stop_token_ids=(ids[-1],))
    assert whole.end.matched_stop == "cd"


def test_a_stop_string_at_the_last_place_is_a_stop():
    count = len(tokenizer().encode("ab cd"))
    whole = ended("ab cd", stop=("cd",), max_tokens=count)
    assert (whole.reason, whole.end.matched_stop, len(whole.tokens)) == ("stop", "cd", count)


def test_half_a_character_at_the_end_may_complete_a_stop_string():
    ids = tokenizer().encode("a漢")
    whole = ended("a漢", stop=("\ufffd",), max_tokens=len(ids) - 1)
    assert (whole.reason, whole.end.matched_stop) == ("stop", "\ufffd")


def test_blocks_behind_a_stop_string_are_free_at_once():
    async def test():
        async with running(num_blocks=4, step_s=0.001) as it:
            whole = await it.text("r", "one two three", stop=("two",), max_tokens=40)
            assert whole.end.matched_stop == "two"
            await it.idle()

    run(test)
