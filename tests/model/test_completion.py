"""Where a sequence ends, and that ids, log-probabilities, text and usage end at the same token."""

import pytest

from minimax_jax.chat import Chat, Prompt, Tokenizer
from minimax_jax.completion import Collector, TokenLogprob
from minimax_jax.loaded import ASSETS
from tests.chat.chats import LOOK_UP, NS

TOKENIZER = Tokenizer.load(ASSETS / "tiny")
CHAT = Prompt(ids=[1, 2], text="hello<mm:think>", chat=Chat(messages=[], tools=[LOOK_UP]))


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
    assert completion.usage.completion_tokens == len(encode("12")) + 1
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)


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
    """F143, as the policy has it: a stop string ends the text wherever it is generated."""
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


CALL = f'{NS}<tool_call>\n{NS}<invoke name="look_up">{NS}<word>é{NS}</word>{NS}</invoke>\n'


def test_a_call_is_in_the_message_and_is_the_reason_to_finish():
    """F27: the thought was never closed, and the call counts."""
    ids = [*encode(f"plan{CALL}{NS}</tool_call>"), *TOKENIZER.stop_ids]
    completion = done(collect(ids, prompt=CHAT, reply_id="r"))
    message = completion.message
    assert message is not None and message.to_dict() == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "plan",
        "tool_calls": [
            {
                "id": "call_r_0",
                "type": "function",
                "function": {"name": "look_up", "arguments": '{"word": "é"}'},
            }
        ],
    }
    assert (completion.text, completion.finish_reason) == ("", "tool_calls")


def test_a_call_cut_by_the_length_is_no_reason_to_finish():
    ids = encode(f"plan{CALL[:-20]}")
    completion = done(collect(ids, prompt=CHAT, max_tokens=len(ids)))
    assert completion.finish_reason == "length"
    assert completion.message is not None and not completion.message.tool_calls[0].complete


@pytest.mark.parametrize("dispatch", [1, 3, 1000])
def test_message_deltas_merge_to_the_message_however_often_they_are_taken(dispatch):
    """F138: and neither log-probabilities nor the reason are lost in thought, text and call."""
    ids = [*encode(f"plan</mm:think>Hi{CALL}{NS}</tool_call>"), *TOKENIZER.stop_ids]
    whole = done(collect(ids, prompt=CHAT)).message
    collector = Collector(CHAT, TOKENIZER, max_tokens=1000, stop_ids=TOKENIZER.stop_ids)
    deltas = []
    for place, token in enumerate(ids, start=1):
        collector.push(TokenLogprob(token_id=token, logprob=0.0))
        if place % dispatch == 0 or place == len(ids):
            deltas.append(collector.delta(0).message)
    found = done(collector)
    assert (found.message, found.finish_reason) == (whole, "tool_calls")
    assert [one.token_id for one in found.logprobs] == ids
    assert "".join(delta.reasoning or "" for delta in deltas) == whole.reasoning
    assert "".join(delta.content or "" for delta in deltas) == whole.content
    arguments = [call.arguments for delta in deltas for call in delta.tool_calls]
    assert "".join(arguments) == whole.tool_calls[0].arguments


def test_a_stop_string_that_ended_the_text_is_named():
    completion = done(collect(encode("a</mm:think>b; c"), prompt=CHAT, stop=["x", ";"]))
    assert (completion.text, completion.stop, completion.is_whole) == ("b", ";", False)
    assert done(collect(encode("a"), max_tokens=1)).stop is None
