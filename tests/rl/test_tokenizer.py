"""The bundled tokenizer: what is one token, what is not, and that training gives it back."""

import json
import re
import shutil

import pytest

from minimax_jax.chat import Tokenizer
from rl.data import LEDGERS, SHORT, problems
from rl.tokenizer import EOS, MARKERS, VOCABULARY_ROWS, train_tokenizer
from tests.chat.folders import TINY


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(TINY)


@pytest.mark.slow
def test_training_again_gives_the_shipped_files(tmp_path):
    """15 s."""
    shutil.copy(TINY / "chat_template.jinja", tmp_path)
    train_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / name).read_bytes() == (TINY / name).read_bytes(), name


def test_vocabulary_leaves_padding_rows(tokenizer):
    assert VOCABULARY_ROWS - 32 <= tokenizer.num_tokens < VOCABULARY_ROWS


@pytest.mark.parametrize("marker", MARKERS)
def test_marker_is_one_token(tokenizer, marker):
    assert tokenizer.encode(f"a{marker}1") == [
        *tokenizer.encode("a"),
        tokenizer.token_id(marker),
        *tokenizer.encode("1"),
    ]


def test_markers_are_not_special():
    added = json.loads((TINY / "tokenizer.json").read_text())["added_tokens"]
    assert sorted(token["content"] for token in added) == sorted(MARKERS)
    assert not any(token["special"] for token in added)


def test_digit_is_always_a_token_of_its_own(tokenizer):
    pieces = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.num_tokens)]
    assert not [piece for piece in pieces if len(piece) > 1 and re.search(rb"\d", piece)]


def test_every_word_of_the_problems_is_one_token(tokenizer):
    for families, count in ((SHORT, 500), (LEDGERS, 10)):
        for problem in problems("held_out", count=count, families=families):
            for word in re.findall(r" ?[A-Za-z]+", problem.question):
                assert len(tokenizer.encode(word)) == 1, word


def test_generation_stops_at_the_turn_end(tokenizer):
    assert tokenizer.stop_ids == (tokenizer.token_id(EOS),)
