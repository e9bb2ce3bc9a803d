"""Where a sequence ends, and that ids, log-probabilities, text and usage end at the same token."""

import pytest

from minimax_jax.chat import Tokenizer
from minimax_jax.completion import Collector, Prompt, TokenLogprob
from minimax_jax.loaded import ASSETS

TOKENIZER = Tokenizer.load(ASSETS / "tiny")
CHAT = Prompt(ids=[1, 2], chat_text="hello<mm:think>")


def collect(ids, prompt: Prompt | None = None, **options) -> Collector:
    """A collector fed until it ends."""
    options = {"max_tokens": 1000, "stop_ids": TOKENIZER.stop_ids} | options
    collector = Collector(prompt or Prompt(ids=[1]), TOKENIZER, **options)
    for token in ids:
        if collector.finish_reason is None:
            collector.push(TokenLogprob(token_id=token, logprob=-1.0))
    return collector


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def done(collector: Collector):
    return collector.completion(0.0, logprobs=True)


def test_a_stop_id_ends_the_text_before_itself():
    completion = done(collect([*encode("12"), *TOKENIZER.stop_ids, *encode("99")]))
    assert (completion.text, completion.finish_reason) == ("12", "stop")
    assert completion.completion_tokens == len(encode("12")) + 1
    assert completion.logprobs is not None
    assert len(completion.logprobs) == completion.completion_tokens


def test_a_stop_at_the_last_allowed_place_is_a_stop():
    ids = [*encode("12"), *TOKENIZER.stop_ids]
    assert done(collect(ids, max_tokens=len(ids))).finish_reason == "stop"


def test_the_length_ends_a_text_that_goes_on():
    completion = done(collect(encode("12345"), max_tokens=3))
    assert (completion.text, completion.finish_reason) == ("123", "length")


@pytest.mark.parametrize("stop", ["Question:", "stion"])
def test_a_stop_string_ends_text_ids_and_logprobs_at_one_token(stop):
    ids = encode("2 Question: x")
    completion = done(collect(ids, stop=[stop]))
    assert completion.finish_reason == "stop"
    assert completion.text == "2 Question: x"[: "2 Question: x".index(stop)]
    assert stop in TOKENIZER.decode(completion.token_ids)
    assert stop not in TOKENIZER.decode(completion.token_ids[:-1])


def test_stop_strings_match_inside_the_thought():
    ids = encode("Question: 1+1</mm:think>2")
    completion = done(collect(ids, prompt=CHAT, stop=["Question:"]))
    assert (completion.reasoning, completion.text) == ("", "")


def test_a_chat_is_split_into_thought_and_answer():
    completion = done(collect([*encode("a</mm:think>b"), *TOKENIZER.stop_ids], prompt=CHAT))
    assert (completion.reasoning, completion.text) == ("a", "b")


def test_a_thought_that_never_closes_leaves_the_answer_empty():
    completion = done(collect(encode("why"), prompt=CHAT, max_tokens=len(encode("why"))))
    assert (completion.reasoning, completion.text) == ("why", "")
    assert completion.finish_reason == "length"


def test_deltas_join_to_the_text_and_hold_back_the_start_of_a_stop_string():
    ids = encode("ab Ques ab Question: x")
    collector = Collector(Prompt(ids=[1]), TOKENIZER, max_tokens=100, stop=["Question:"])
    pieces = []
    for token in ids:
        if collector.finish_reason is None:
            collector.push(TokenLogprob(token_id=token, logprob=0.0))
            pieces.append(collector.delta(0))
    assert "".join(piece.text for piece in pieces) == "ab Ques ab "
    assert sum(len(piece.token_ids) for piece in pieces) == len(collector.entries)


def test_a_character_in_pieces_comes_out_whole():
    ids = [token for token in encode("x🙂")]
    collector = Collector(Prompt(ids=[1]), TOKENIZER, max_tokens=len(ids))
    pieces = []
    for token in ids:
        collector.push(TokenLogprob(token_id=token, logprob=0.0))
        pieces.append(collector.delta(0).text)
    assert "".join(pieces) == "x🙂" and "\ufffd" not in "".join(pieces)


def test_a_broken_sequence_ends_with_an_error():
    collector = collect(encode("1"))
    collector.finish("error")
    assert done(collector).finish_reason == "error"
