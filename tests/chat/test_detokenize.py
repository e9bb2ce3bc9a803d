"""Text as it comes, one token at a time: whole characters, and stop strings across tokens."""

import random

import pytest

from minimax_jax.chat import DecodeStream, TextStream, Tokenizer
from tests.chat.folders import TINY
from tests.chat.test_tokenizer import TEXTS

LETTERS = "ab \n漢🙂"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(TINY)


@pytest.fixture(scope="module")
def byte_ids(tokenizer):
    """The id of each byte, so that a test decides where tokens end."""
    ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.num_tokens)}
    return lambda data: [ids[bytes([byte])] for byte in data]


def decoded(tokenizer, ids):
    decoder = DecodeStream(tokenizer)
    return [*(decoder.push(token_id) for token_id in ids), decoder.finish()]


def streamed(stream, ids):
    """The pieces up to a stop, the one at the end included."""
    pieces = []
    for token_id in ids:
        pieces.append(stream.push(token_id))
        if stream.match is not None:
            return pieces
    return [*pieces, stream.finish()]


def first_complete(text, stops):
    """The stop string that is complete first, the longest of several, and the text before it."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return stop, text[: end - len(stop)]
    return None, text


def test_split_emoji_is_withheld_until_it_is_complete(tokenizer):
    """F20: four tokens make one character; until the last of them nothing comes out."""
    ids = tokenizer.encode("😀")
    assert len(ids) == 4
    assert decoded(tokenizer, ids) == ["", "", "", "😀", ""]


@pytest.mark.parametrize("text", TEXTS)
def test_stream_of_a_text_has_no_replacement_character(tokenizer, text):
    """F20: emoji, CJK and joined emoji."""
    pieces = decoded(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_streamed_pieces_of_random_tokens_join_to_the_whole_text(tokenizer):
    draw = random.Random(1)
    for _ in range(300):
        ids = [draw.randrange(tokenizer.num_tokens) for _ in range(20)]
        assert "".join(decoded(tokenizer, ids)) == tokenizer.decode(ids)
        assert "".join(streamed(TextStream(tokenizer), ids)) == tokenizer.decode(ids)


def test_character_that_never_ends_comes_out_at_the_finish(tokenizer):
    ids = tokenizer.encode("😀")[:2]
    assert decoded(tokenizer, ids) == ["", "", "\ufffd"]
    assert streamed(TextStream(tokenizer, stop=["x"]), ids) == ["", "", "\ufffd"]


def test_invalid_bytes_are_replaced_where_they_stand(tokenizer, byte_ids):
    ids = byte_ids(b"a\xff\xf0\x9fb\xe6\xbc")
    assert "".join(decoded(tokenizer, ids)) == "a\ufffd\ufffdb\ufffd" == tokenizer.decode(ids)


def test_space_before_a_word_belongs_to_the_word(tokenizer):
    ids = tokenizer.encode("a  b c")
    assert "".join(decoded(tokenizer, ids)) == "a  b c"
    for start in range(len(ids)):
        assert "".join(decoded(tokenizer, ids[start:])) == tokenizer.decode(ids[start:])


def test_stop_string_is_found_wherever_tokens_end(tokenizer, byte_ids):
    stops = ["stop", "漢字", "\n\n"]
    for text in ("ab stop cd", "a 漢字", "a\n\n\nb", "sto\n stopp", "no end"):
        stop, before = first_complete(text, stops)
        for ids in (tokenizer.encode(text), byte_ids(text.encode())):
            stream = TextStream(tokenizer, stop=stops)
            assert "".join(streamed(stream, ids)) == before
            assert (stream.match and stream.match.stop) == stop


def test_any_stop_strings_over_any_tokens_agree_with_a_search_of_the_whole(tokenizer, byte_ids):
    draw = random.Random(2)
    stopped = 0
    for _ in range(2000):
        text = "".join(draw.choices(LETTERS, k=12))
        stops = ["".join(draw.choices(LETTERS, k=draw.randint(1, 4))) for _ in range(3)]
        stop, before = first_complete(text, stops)
        ids = draw.choice((tokenizer.encode, lambda text: byte_ids(text.encode())))(text)
        for include in (False, True):
            stream = TextStream(tokenizer, stop=stops, include_stop=include)
            pieces = streamed(stream, ids)
            assert "".join(pieces) == before + (stop or "") * include
            assert (stream.match and stream.match.stop) == stop
        stopped += stop is not None
    assert 200 < stopped < 2000, "both outcomes occur"


def test_stop_string_is_mapped_back_to_tokens(tokenizer):
    draw = random.Random(3)
    for _ in range(500):
        text = "".join(draw.choices(LETTERS, k=12))
        stop = "".join(draw.choices(LETTERS, k=draw.randint(1, 3)))
        ids = tokenizer.encode(text)
        stream = TextStream(tokenizer, stop=[stop])
        streamed(stream, ids)
        if stream.match is None:
            continue
        kept = [bytes(b"".join(map(tokenizer.token_bytes, ids[:n]))) for n in range(len(ids) + 1)]
        end = text.encode().index(stop.encode()) + len(stop.encode())
        assert stream.match.num_tokens == min(n for n, b in enumerate(kept) if len(b) >= end)
        start = end - len(stop.encode())
        assert stream.match.num_tokens_before == max(
            n for n, b in enumerate(kept) if len(b) <= start
        )


def test_token_that_holds_part_of_a_stop_character_is_not_before_it(tokenizer, byte_ids):
    stream = TextStream(tokenizer, stop=["🙂"])
    assert streamed(stream, byte_ids("a🙂b".encode())) == ["a", "", "", "", ""]
    assert (stream.match.num_tokens, stream.match.num_tokens_before) == (5, 1)


def test_start_of_a_stop_string_waits_until_it_is_none(tokenizer, byte_ids):
    stream = TextStream(tokenizer, stop=["Question:", "ends"])
    assert streamed(stream, byte_ids(b"Ques en")) == ["", "", "", "", "Ques ", "", "", "en"]


def test_tokens_are_certain_once_no_stop_string_can_reach_them(tokenizer, byte_ids):
    stream, certain = TextStream(tokenizer, stop=["END"]), []
    for token_id in byte_ids("xENxE漢".encode()):
        stream.push(token_id)
        certain.append(stream.num_certain_tokens)
    assert certain == [1, 1, 1, 4, 4, 4, 4, 8]


def test_stop_string_that_overlaps_itself_is_found(tokenizer, byte_ids):
    stream = TextStream(tokenizer, stop=["aab"])
    assert "".join(streamed(stream, byte_ids(b"aaab"))) == "a"


def test_stop_string_of_replacement_characters_ends_at_the_finish(tokenizer, byte_ids):
    stream = TextStream(tokenizer, stop=["\ufffd"])
    assert "".join(streamed(stream, byte_ids(b"a\xf0"))) == "a"
    assert stream.match is not None


def test_what_is_held_back_does_not_grow_with_the_text(tokenizer):
    stream = TextStream(tokenizer, stop=["abcdefgh"])
    for _ in range(2000):
        for token_id in tokenizer.encode("abcdefg "):
            stream.push(token_id)
            assert len(stream._held) < len("abcdefgh") and len(stream._tokens._ends) <= 9


def test_empty_stop_string_is_refused(tokenizer):
    with pytest.raises(ValueError, match="a stop string is empty"):
        TextStream(tokenizer, stop=["a", ""])
