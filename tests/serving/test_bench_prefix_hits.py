"""The theoretical hit rate against a count that knows no hashes, and the sessions it is made of."""

from array import array
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from minimax_jax.chat import Tokenizer
from serving.bench.agents import Play, hits_of_plays, plan
from serving.bench.asks import Ask, Segment
from serving.bench.client import Facts
from serving.bench.options import Agentic, Numbers
from serving.bench.prefix_hits import EndlessCache, GrowingPrompt, Hits, hits_of_asks, num_shared
from serving.bench.sessions import (
    COMPACT_AT,
    MARKER,
    Planner,
    Shape,
    Thread,
    from_turn,
    num_requests,
)
from serving.bench.words import Words
from serving.bench.workload import Texts
from tests.chat.folders import TINY

WINDOW = 2048
FACTS = Facts(model="m", vocab_size=300, stop_ids=(7, 9))
WORDS = Words(FACTS, None)


def shared(one: list[int], other: list[int]) -> int:
    """How many first tokens two prompts have in common."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def counted(prompts: list[list[int]], size: int) -> list[int]:
    """What each prompt finds of those before it, by comparing them one with another."""
    found = []
    for place, prompt in enumerate(prompts):
        most = [min(shared(prompt, other), len(prompt) - 1) for other in prompts[:place]]
        # A block is there only where all of it is another prompt's.
        found.append(max((length // size * size for length in most), default=0))
    return found


def asks_of(prompts: list[list[int]]) -> list[Ask]:
    return [
        Ask(request_id=str(i), segments=(Segment(ids=array("i", ids)),), max_tokens=1)
        for i, ids in enumerate(prompts)
    ]


@pytest.mark.parametrize("size", [1, 4, 16])
def test_hits_are_those_of_a_comparison_token_by_token(size):
    random = np.random.default_rng(size)
    prompts: list[list[int]] = []
    for _ in range(60):
        head = prompts[random.integers(len(prompts))] if prompts else []
        cut = int(random.integers(len(head) + 1))
        prompts.append(head[:cut] + random.integers(0, 2, random.integers(1, 40)).tolist())
    found = hits_of_asks(asks_of(prompts), size)
    assert [found[str(i)].found for i in range(60)] == counted(prompts, size)
    assert [found[str(i)].tokens for i in range(60)] == [len(prompt) for prompt in prompts]


@pytest.mark.parametrize(("length", "found"), [(8, 4), (9, 8), (11, 8), (12, 8), (13, 12)])
def test_a_prompt_sent_again_finds_whole_blocks_before_its_last_token(length, found):
    prompts = [list(range(length))] * 2
    assert hits_of_asks(asks_of(prompts), 4)["1"] == Hits(length, found)


def test_a_prompt_that_becomes_another_has_the_blocks_of_one_made_whole():
    grown, cache = GrowingPrompt(), EndlessCache(4)
    grown.become(array("i", range(10)))
    cache.hits(grown)
    grown.become(array("i", [*range(6), 90, 91, 92]))
    whole = GrowingPrompt()
    whole.become(array("i", [*range(6), 90, 91, 92]))
    assert grown.chain(4) == whole.chain(4)
    assert cache.hits(grown) == Hits(9, 4)


def test_shared_tokens_are_found_by_halving_as_by_comparing():
    random = np.random.default_rng(5)
    for _ in range(200):
        one, other = (random.integers(0, 2, random.integers(0, 9)).tolist() for _ in range(2))
        assert num_shared(array("i", one), array("i", other)) == shared(one, other)


def test_warm_ups_are_known_but_not_counted():
    first, second = asks_of([[1, 2, 3, 4, 5]] * 2)
    assert hits_of_asks([replace(first, is_measured=False), second], 2) == {"1": Hits(5, 4)}


def test_texts_of_unknown_tokens_are_left_out():
    ask = Ask(request_id="t", segments=(Segment(text="abc"),), max_tokens=1)
    assert hits_of_asks([ask], 4) == {}


def test_a_chat_finds_of_the_cache_what_its_rendered_prompts_share():
    texts = Texts.load("tiny")
    session = planner(words=Words(FACTS, texts.tokenizer)).session(2)
    prompts = [list(texts.ids_of_chat(s) or ()) for _, s in from_turn(session, 0)]
    found = hits_of_plays([Play(session=session)], 16, texts.ids_of_chat)
    main = [found[turn.request_id] for turn in session]
    assert [hits.tokens for hits in main] == [len(prompt) for prompt in prompts]
    assert [hits.found for hits in main] == counted(prompts, 16)
    assert len(found) == num_requests(session, 0)


def test_a_chat_of_an_unknown_template_has_no_theory():
    assert hits_of_asks(asks_of([[1, 2, 3]]), 1, Texts().ids_of_chat) == {}


def planner(seed: int = 0, play: int = 0, words: Words = WORDS) -> Planner:
    return Planner(Shape.scaled(Agentic(), WINDOW), words, seed, play)


def threads(session: Thread) -> list[Thread]:
    """A session's main thread and its sub-agents."""
    return [session, *(turn.child for turn in session if turn.child)]


def prompts_of(thread: Thread, start: int = 0) -> list[list[int]]:
    ends = from_turn(thread, start)
    return [[token for one in segments for token in one.ids or ()] for _, segments in ends]


PLANNER = planner()
SESSIONS = [PLANNER.session(index) for index in range(12)]


@pytest.mark.parametrize("size", [16, 64])
def test_hits_of_sessions_are_those_of_a_comparison(size):
    """Sub-agents share nothing, so where in a session their turns come does not matter."""
    for session in SESSIONS[:4]:
        plays = plan_one(session)
        found = hits_of_plays(plays, size)
        expected: dict[str, int] = {}
        for thread in threads(session):
            names = [turn.request_id for turn in thread]
            expected |= dict(zip(names, counted(prompts_of(thread), size), strict=True))
        assert {name: hits.found for name, hits in found.items()} == expected


def plan_one(session: Thread, start: int = 0):
    return [Play(session=session, start=start)]


def test_a_session_begun_later_finds_what_its_warm_up_sent():
    session, start = SESSIONS[1], 7
    main = {turn.request_id for turn in session}
    found = {n: h for n, h in hits_of_plays(plan_one(session, start), 16).items() if n in main}
    prompts = prompts_of(session, start - 1)
    assert [hits.found for hits in found.values()] == counted(prompts, 16)[1:]
    assert next(iter(found.values())).found > 0


def test_no_request_is_longer_than_the_window_and_some_contexts_are_compacted():
    compacted = 0
    for session in SESSIONS:
        for thread in threads(session):
            for turn, segments in from_turn(thread, 0):
                length = sum(len(one.ids or ()) for one in segments)
                assert length <= COMPACT_AT * WINDOW
                assert length + turn.max_tokens <= WINDOW
                compacted += turn.kept == 1
    assert compacted > 0


def test_a_turn_keeps_everything_and_adds_the_recorded_answer_and_a_result():
    grown = [(turn, before) for s in SESSIONS for before, turn in pairwise(s)
             if turn.kept > 1]  # fmt: skip
    assert grown
    for turn, before in grown:
        answer, result = turn.added
        assert (answer.role, result.role) == ("assistant", "user")
        assert len(answer.ids or ()) == before.max_tokens


def test_sessions_have_sub_agents_of_both_kinds_with_contexts_of_their_own():
    with_child = [turn for session in SESSIONS for turn in session if turn.child]
    assert {turn.is_joined for turn in with_child} == {True, False}
    heads = [tuple(prompt[:MARKER]) for session in SESSIONS for thread in threads(session)
             for prompt in prompts_of(thread)[:1]]  # fmt: skip
    assert len(set(heads)) == len(heads)
    num_turns = sum(map(len, SESSIONS))
    assert num_turns / 30 < len(with_child) < num_turns / 8


def test_plays_of_a_seed_differ_in_their_markers_alone():
    one, other = planner(play=1).session(0), planner(play=2).session(0)
    for a, b in zip(prompts_of(one), prompts_of(other), strict=True):
        assert a[:MARKER] != b[:MARKER]
        assert a[MARKER:] == b[MARKER:]
    assert prompts_of(planner(seed=1).session(0)) != prompts_of(planner(seed=0).session(0))


def test_lengths_have_the_medians_that_the_shape_names():
    outputs = [turn.max_tokens for session in SESSIONS for turn in session]
    results = [len(turn.added[1].ids or ()) for s in SESSIONS for turn in s[1:] if turn.kept > 1]
    assert np.median(outputs) == pytest.approx(200 / 64, abs=1)
    assert np.median(results) == pytest.approx(800 / 64, rel=0.3)


def test_the_first_session_of_each_lane_begins_in_its_middle():
    plays = plan(planner(), num_sessions=6, lanes=3, start=(0.25, 0.75), seed=0)
    shares = [play.start / len(play.session) for play in plays]
    assert all(0.2 < share <= 0.75 for share in shares[:3])
    assert shares[3:] == [0, 0, 0]


def test_a_window_without_room_for_a_system_prompt_is_refused():
    with pytest.raises(ValueError, match="lower --agentic-scale"):
        Shape.scaled(Agentic(agentic_scale=1.0), WINDOW)


def test_the_longest_window_has_the_counts_at_full_size():
    shape = Shape.scaled(Agentic(agentic_turns=Numbers((1, 2))), 1 << 20)
    assert (shape.system, shape.turns) == ((13_000, 17_000), (1, 2))


def test_words_are_encoded_as_they_were_drawn():
    tokenizer = Tokenizer.load(TINY)
    words = Words(FACTS, tokenizer)
    for session in [planner(words=words).session(0)]:
        for turn in session:
            for segment in turn.added:
                assert tokenizer.encode(segment.text or "") == list(segment.ids or ())


def test_random_ids_are_no_stop_tokens():
    drawn = set(WORDS.draw(np.random.default_rng(0), 10_000))
    assert drawn == set(range(300)) - {7, 9}


def test_a_server_that_tells_no_vocabulary_needs_a_tokenizer():
    with pytest.raises(ValueError, match="--tokenizer"):
        Words(Facts(model="m"), None)
