"""A sequence's way through its grammar: stop tokens, drafts, thoughts, and threads."""

import json
import threading

import numpy as np
import pytest

from minimax_jax.chat.dialects import M3
from serving.grammar.mask_workers import MaskWorkers
from serving.grammar.source import Thought, thought_after
from serving.grammar.vocabulary import GrammarVocabulary
from tests.serving.grammars import (
    VOCAB_SIZE,
    accepts,
    allowed,
    draw,
    matcher,
    outgrowing,
    plain_ids,
    tokenizer,
    vocabulary,
)

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "ids": {"type": "array", "items": {}}},
        "required": ["name"],
    }
)


def _drawn_ids(seed: int, most: int = 40) -> list[int]:
    rng, one, ids = np.random.default_rng(seed), matcher("json", SCHEMA), []
    while len(ids) < most and not one.must_stop:
        ids.append(int(rng.choice(allowed(one))))
        one.advance(ids[-1:])
    return ids


def test_padding_and_control_tokens_are_never_allowed():
    one = matcher("json", SCHEMA)
    one.advance(plain_ids('{"name":"'))
    controls = [i for i in range(VOCAB_SIZE) if i >= tokenizer().encode("]~b]")[0]]
    assert set(allowed(one)).isdisjoint(controls)
    # Spelled by ordinary tokens a marker is text like any other.
    assert accepts(one, plain_ids(']~b]<mm:think>"}'))


def test_packed_mask_has_a_bit_for_each_token():
    narrow = GrammarVocabulary(tokenizer(), tokenizer().num_tokens)
    for which in (narrow, vocabulary()):
        chosen = [0, 31, 32, tokenizer().num_tokens - 1]
        packed = which.mask_of(chosen)
        assert packed.dtype == np.uint32 and packed.shape == (which.num_words,)
        assert [i for i in range(which.vocab_size) if packed[i // 32] >> (i % 32) & 1] == chosen
        assert np.flatnonzero(which.unpack(packed)).tolist() == chosen
        assert which.unpack(np.stack([packed, packed])).shape == (2, which.vocab_size)
    with pytest.raises(ValueError, match="vocab_size=100 is less than the 501 tokens"):
        GrammarVocabulary(tokenizer(), 100)


def test_stop_tokens_are_allowed_exactly_where_the_grammar_accepts():
    extra = tokenizer().encode("]~b]")[0]
    stops = [*tokenizer().stop_ids, extra]
    one = matcher("regex", "ab?(cd)?", stop_ids=stops)
    for letter, accepting in zip("abcd", (True, True, False, True), strict=True):
        one.advance(plain_ids(letter))
        assert one.is_accepting == accepting
        assert set(stops).intersection(allowed(one)) == (set(stops) if accepting else set())
    assert one.must_stop and set(allowed(one)) == set(stops)
    one.advance([extra])
    assert one.is_accepting and set(allowed(one)) == set(stops)
    with pytest.raises(ValueError, match="is not allowed by the grammar after 5 tokens"):
        one.advance(plain_ids("a"))


def test_end_of_the_turn_that_is_no_stop_token_is_not_allowed():
    newline = plain_ids("\n")
    one = matcher("regex", "a", stop_ids=newline)
    one.advance(plain_ids("a"))
    assert set(allowed(one)) == set(newline)


def test_refused_tokens_leave_the_matcher_where_it_was():
    one = matcher("regex", "ab*")
    one.advance(plain_ids("ab"))
    before = one.mask()
    with pytest.raises(ValueError, match="is not allowed by the grammar after 4 tokens"):
        one.advance(plain_ids("bbc"))
    for token in (VOCAB_SIZE - 1, VOCAB_SIZE + 7, -1, tokenizer().encode("<mm:think>")[0]):
        with pytest.raises(ValueError, match=f"token {token} is not allowed"):
            one.advance([token])
    assert one.num_tokens == 2 and np.array_equal(one.mask(), before)


@pytest.mark.parametrize("seed", range(6))
def test_rolled_back_matcher_equals_a_fresh_one(seed):
    ids, rng = _drawn_ids(seed), np.random.default_rng(seed)
    one = matcher("json", SCHEMA)
    one.advance(ids)
    while one.num_tokens:
        one.rollback(int(rng.integers(1, min(one.num_tokens, 7) + 1)))
        fresh = matcher("json", SCHEMA)
        fresh.advance(ids[: one.num_tokens])
        assert np.array_equal(one.mask(), fresh.mask())
        assert one.is_accepting == fresh.is_accepting
    with pytest.raises(ValueError, match="cannot take back 1 of 0 tokens"):
        one.rollback(1)


@pytest.mark.parametrize("seed", range(6))
def test_masks_of_drafts_are_those_of_each_place_and_change_nothing(seed):
    ids = _drawn_ids(seed)
    one, stepped = matcher("json", SCHEMA), matcher("json", SCHEMA)
    for start in range(0, len(ids), 5):
        drafts = ids[start : start + 5]
        rows = one.masks(drafts)
        assert rows.shape == (len(drafts) + 1, vocabulary().num_words)
        assert one.num_tokens == start
        for row, draft in zip(rows, drafts, strict=False):
            assert np.array_equal(row, stepped.mask())
            stepped.advance([draft])
        assert np.array_equal(rows[-1], stepped.mask())
        one.advance(drafts)


def test_f108_no_draft_behind_a_refused_one_is_looked_at():
    """F108: drafts that the grammar refuses are no error, and leave no trace."""
    one = matcher("regex", "abc")
    drafts = plain_ids("axbc")
    rows = one.masks(drafts)
    assert not vocabulary().unpack(rows[1])[drafts[1]]
    assert all(np.array_equal(row, vocabulary().valid) for row in rows[2:])
    one.advance(plain_ids("abc"))
    stop = tokenizer().stop_ids[0]
    rows = one.masks([stop, stop, 5])
    assert [np.flatnonzero(vocabulary().unpack(row)).tolist() for row in rows[:2]] == [[stop]] * 2
    assert one.num_tokens == 3 and one.must_stop


def test_forced_tokens_are_the_tokenizers_own_spelling():
    one = matcher(
        "json", '{"type":"object","properties":{"together":{"const":1}},"required":["together"]}'
    )
    one.advance(plain_ids('{"'))
    text = tokenizer().decode(one.forced())
    assert text.startswith("togethe") and one.num_tokens == 2
    one.advance(one.forced())
    assert accepts(one, plain_ids('together":1}'[len(text) :]))
    assert matcher("regex", "(ab)?").forced() == []


THOUGHT_END = tokenizer().encode("</mm:think>")


@pytest.mark.parametrize("end", [THOUGHT_END, plain_ids("</mm:think>")], ids=["token", "spelled"])
@pytest.mark.parametrize(("kind", "text"), [("regex", "[0-9]{3}"), ("json", '{"type":"integer"}')])
def test_grammar_begins_behind_the_thought(kind, text, end):
    one = matcher(kind, text, Thought.OPEN)
    one.advance(tokenizer().encode('let me see: {"a" </mm:thi'))
    assert set(tokenizer().stop_ids).isdisjoint(allowed(one))
    one.advance(end)
    assert plain_ids("a")[0] not in allowed(one) and plain_ids("1")[0] in allowed(one)
    assert accepts(one, plain_ids("123"))


def test_thought_may_be_empty_and_holds_no_other_marker():
    one = matcher("regex", "a", Thought.OPEN)
    markers = [tokenizer().encode(text)[0] for text in ("<mm:think>", "]<]minimax[>[", "]~b]")]
    assert set(markers).isdisjoint(allowed(one))
    one.advance(THOUGHT_END)
    assert accepts(one, plain_ids("a"))


def test_thought_that_may_come_is_optional():
    for begin in ("", "<mm:think>so</mm:think>", "</mm:think>"):
        assert accepts(matcher("regex", "a", Thought.POSSIBLE), tokenizer().encode(begin + "a"))
    assert not accepts(matcher("regex", "a", Thought.OVER), tokenizer().encode("</mm:think>a"))


def test_grammar_from_the_first_token_binds_the_thought():
    one = matcher("regex", "a", Thought.OPEN, from_first_token=True)
    assert accepts(one, plain_ids("a"))


def test_where_the_thought_stands_is_read_from_the_end_of_the_prompt():
    assert thought_after("]~b]ai\n<mm:think>\n", M3) is Thought.OPEN
    assert thought_after("<mm:think>]~b]ai\n</mm:think>", M3) is Thought.OVER
    assert thought_after("</mm:think>]~b]ai\n", M3) is Thought.POSSIBLE


def test_drafts_across_the_end_of_the_thought():
    drafts = [*tokenizer().encode("so"), *THOUGHT_END, *plain_ids("12")]
    one = matcher("regex", "[0-9]{3}", Thought.OPEN)
    rows = [np.flatnonzero(vocabulary().unpack(row)) for row in one.masks(drafts)]
    digits = set(plain_ids("0123456789"))
    assert digits < set(rows[0]) and len(rows[0]) > 400
    assert set(rows[-1]) <= digits and set(rows[-1]) and one.num_tokens == 0


def test_threads_make_the_same_masks_and_end():
    kinds = [("json", SCHEMA), ("regex", "[a-f]{2,40}x"), ("grammar", 'root ::= [a-z]* "."')]
    before = threading.active_count()
    with MaskWorkers(3) as workers:
        for round_ in range(4):
            asked = []
            for number in range(12):
                kind, text = kinds[number % 3]
                rng = np.random.default_rng(100 * round_ + number)
                drawn = draw(matcher(kind, text), rng, most=8) or ""
                asked.append((matcher(kind, text), tokenizer().encode(drawn)))
            expected = [one.masks(drafts) for one, drafts in asked]
            for made, rows in zip(workers.begin(asked).wait(), expected, strict=True):
                assert isinstance(made, np.ndarray) and np.array_equal(made, rows)
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        workers.begin([(matcher("regex", "a"), ())])


def test_grammar_that_fails_on_a_thread_fails_alone():
    worse = outgrowing()
    good = matcher("regex", "a")
    with MaskWorkers(2) as workers:
        failed, made = workers.begin([(worse, plain_ids("xa")), (good, ())]).wait()
    assert isinstance(failed, RuntimeError) and "the grammar cannot go on" in str(failed)
    assert isinstance(made, np.ndarray) and np.array_equal(made, good.masks(()))


def test_pool_needs_a_thread():
    with pytest.raises(ValueError, match="num_threads=0 is not at least 1"):
        MaskWorkers(0)
