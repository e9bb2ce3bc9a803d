"""The options through `generate`: the field's cases by their ids, texts as bad words, ends that
come too early, refusals.
"""

from dataclasses import replace

import numpy as np
import pytest

from minimax_jax import generate
from minimax_jax.bad_words import bad_word_ids
from minimax_jax.chat.detokenize import TextStream
from minimax_jax.loaded import LoadedModel
from tests.model.models import random_loaded, small, tokens

PROMPT = tokens(130, seed=2)
DRAWN = {"max_tokens": 12, "temperature": 1.0}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return random_loaded(small(2, num_tokens=501))


@pytest.fixture(scope="module")
def without_stops(loaded) -> LoadedModel:
    """The same model, which never ends by itself."""
    return replace(loaded, tokenizer=None, template=None)


def ids(loaded, prompts, **options) -> list[tuple[int, ...]]:
    return [one.token_ids for one in generate(loaded, prompts, **{**DRAWN, **options})]


def test_f114_a_seeded_sequence_is_the_same_alone_in_any_slot_and_after_preemption(without_stops):
    alone = ids(without_stops, PROMPT, seed=42)[0]
    assert ids(without_stops, PROMPT, seed=42)[0] == alone
    others = [tokens(9, seed=1), tokens(200, seed=3), tokens(40, seed=4)]
    assert ids(without_stops, [*others, PROMPT], seed=39)[3] == alone  # sequence 3: seed 42
    resumed = ids(without_stops, [*PROMPT, *alone[:5]], seed=42, max_tokens=7)[0]
    assert resumed == alone[5:]


def test_f115_several_sequences_of_a_prompt_are_repeatable_and_not_all_equal(without_stops):
    """What concerns sampling of it: sequences of one prompt, their order and their count."""
    first, again = (generate(without_stops, [PROMPT] * 3, seed=7, **DRAWN) for _ in range(2))
    assert [one.token_ids for one in first] == [one.token_ids for one in again]
    assert len({one.token_ids for one in first}) == 3
    assert {one.prompt_tokens for one in first} == {130}
    greedy = ids(without_stops, [PROMPT] * 3, seed=7, temperature=0.0)
    assert len(set(greedy)) == 1


def test_f118_no_id_beyond_the_tokens_comes_out(without_stops):
    """Neither drawn nor as a best token, whatever is added to all that remain."""
    drawn = ids(without_stops, [tokens(5)] * 32, temperature=50.0, max_tokens=64, top_k=480)
    assert max(map(max, drawn)) < 501
    push = {token: -100.0 for token in range(501)}
    assert max(ids(without_stops, tokens(5), temperature=0.0, logit_bias=push)[0]) < 501


def test_f121_a_seed_does_not_make_it_greedy(without_stops):
    drawn = [ids(without_stops, PROMPT, seed=seed)[0] for seed in range(1, 21)]
    assert len(set(drawn)) == 20
    assert ids(without_stops, PROMPT, seed=20)[0] == drawn[-1]
    greedy = [ids(without_stops, PROMPT, seed=s, temperature=0.0)[0] for s in (1, 9)]
    assert greedy[0] == greedy[1]


def test_allowed_ids_are_all_that_comes(without_stops):
    found = ids(without_stops, [PROMPT] * 4, allowed_token_ids=[3, 5, 8])
    assert {token for one in found for token in one} == {3, 5, 8}


def test_a_frequency_penalty_spreads_what_a_bias_favours(without_stops):
    biased = ids(without_stops, PROMPT, temperature=0.0, logit_bias={7: 12.0})[0]
    spread = ids(
        without_stops, PROMPT, temperature=0.0, logit_bias={7: 12.0}, frequency_penalty=2.0
    )[0]
    assert biased.count(7) == 12 and 0 < spread.count(7) < 12


def test_no_end_comes_before_min_tokens(loaded):
    """Neither a stop id nor a stop string; afterwards both end it."""
    ends = {token: 100.0 for token in loaded.tokenizer.stop_ids}
    options = {"temperature": 0.0, "logit_bias": ends}
    [one] = generate(loaded, PROMPT, max_tokens=12, **options)
    assert (len(one.token_ids), one.finish_reason) == (1, "stop")
    [one] = generate(loaded, PROMPT, max_tokens=12, min_tokens=6, **options)
    assert (len(one.token_ids), one.finish_reason) == (7, "stop")


def test_own_stop_ids_end_a_sequence(without_stops):
    said = ids(without_stops, PROMPT, temperature=0.0)[0]
    stop = said[4]
    [one] = generate(without_stops, PROMPT, temperature=0.0, max_tokens=12, stop_token_ids=[stop])
    assert one.token_ids == said[: said.index(stop) + 1] and one.finish_reason == "stop"


def test_stop_strings_are_looked_for_behind_min_tokens(loaded):
    tokenizer = loaded.tokenizer
    spelled = [tokenizer.encode(character)[0] for character in "ababab"]
    for min_tokens, text in ((0, ""), (1, "ab"), (2, "ab"), (3, "abab"), (6, "ababab")):
        stream = TextStream(tokenizer, stop=("ab",), min_tokens=min_tokens)
        found = ""
        for token in spelled:
            if stream.match is None:
                found += stream.push(token)
        assert found + stream.finish() == text


def test_bad_words_never_come(loaded):
    """The greedy answer's own text is forbidden, bit by bit, with and without a space before it."""
    options = {"temperature": 0.0, "max_tokens": 12}
    tokenizer = loaded.tokenizer
    said = generate(loaded, PROMPT, **options)[0].token_ids
    word = next(
        text
        for text in map(tokenizer.decode, ([t] for t in said))
        if text.strip() and "\ufffd" not in text
    )
    [other] = generate(loaded, PROMPT, bad_words=word, **options)
    for forbidden in bad_word_ids(tokenizer, [word]):
        starts = range(len(other.token_ids) - len(forbidden) + 1)
        assert all(other.token_ids[i : i + len(forbidden)] != forbidden for i in starts)
    assert other.token_ids != said


def test_spellings_of_a_bad_word(loaded):
    tokenizer = loaded.tokenizer
    found = bad_word_ids(tokenizer, ["zq", "  zq", "x"])
    assert len(set(found)) == len(found) and tuple(tokenizer.encode("zq")) in found
    for text in ("zq", " zq", "a zq", "x", " x"):
        spelled = tuple(tokenizer.encode(text))
        assert any(spelled[-len(one) :] == one for one in found), text


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"logit_bias": {501: 1.0}}, "logit_bias names token 501, not in 0..500"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"stop_token_ids": [-1]}, "stop_token_ids names token -1"),
        ({"min_tokens": 13}, "min_tokens=13 is more than max_tokens=12"),
        ({"bad_words": " "}, "nothing but spaces"),
        ({"repetition_penalty": -1.0}, "repetition_penalty=-1.0 is not above 0"),
    ],
)
def test_an_impossible_option_is_refused_before_anything_runs(loaded, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        generate(loaded, PROMPT, **DRAWN, **options)


def test_bad_words_need_a_tokenizer(without_stops):
    with pytest.raises(ValueError, match="bad words need a tokenizer"):
        generate(without_stops, PROMPT, bad_words=["x"])


def test_where_nothing_may_follow_the_sequence_ends_in_error(without_stops):
    """Only an end is allowed, and it may not come yet."""
    options = {"allowed_token_ids": [9], "stop_token_ids": [9], "min_tokens": 2, "logprobs": 0}
    [one] = generate(without_stops, PROMPT, **DRAWN, **options)
    assert one.finish_reason == "error" and not np.any(one.token_ids)
