"""Encoding and decoding over a checkpoint's tokenizer.json."""

import json
import random
import shutil

import pytest

from minimax_jax.chat import Chat, ChatFormat, ChatTemplate, Tokenizer
from tests.chat.chats import matrix
from tests.chat.folders import TINY

TEXTS = [
    "",
    "What is 47+85?",
    "  two\n\n\ttabs ",
    "été 漢字 😀👩‍👩‍👧 \u200d",
    "]~b]ai\n<mm:think>7</mm:think>",
]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(TINY)


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_byte_survives_the_round_trip(tokenizer):
    text = "".join(map(chr, range(256))) + "\ufffd\U0010ffff"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_document_start_is_never_added(tokenizer):
    start = tokenizer.token_id("]~!b[")
    assert start not in tokenizer.encode("hi")
    assert tokenizer.encode("]~!b[hi").count(start) == 1


def test_decoding_agrees_with_the_library(tokenizer):
    draw = random.Random(0)
    for _ in range(200):
        ids = [draw.randrange(tokenizer.num_tokens) for _ in range(20)]
        library = tokenizer._backend.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids) == library


def test_padding_ids_are_refused(tokenizer):
    with pytest.raises(ValueError, match="not in the vocabulary"):
        tokenizer.decode([tokenizer.num_tokens])


def test_lone_surrogate_is_refused(tokenizer):
    with pytest.raises(ValueError, match="not valid Unicode"):
        tokenizer.encode("\ud800")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": [7, 8]}}, (7, 8)),
        ({"config.json": {"eos_token_id": 9}}, (9,)),
        ({"config.json": {"text_config": {"eos_token_id": 9}}}, (9,)),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 9}}, (9,)),
        ({"generation_config.json": {"eos_token_id": 7}, "config.json": {"eos_token_id": 9}}, (7,)),
    ],
)
def test_stop_ids_come_from_the_configuration_files(tmp_path, files, expected):
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    assert Tokenizer.load(tmp_path).stop_ids == expected


def test_turn_end_stops_where_nothing_is_configured(tmp_path, tokenizer):
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    assert Tokenizer.load(tmp_path).stop_ids == (tokenizer.token_id("[e~["),)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("generation_config.json", '{"eos_token_id": "x"}', "must be an integer or a list"),
        ("generation_config.json", "{", "not valid JSON"),
        ("config.json", "[]", "must hold a JSON object"),
        ("tokenizer.json", '{"model": ', "not valid JSON"),
        ("tokenizer.json", "{}", "must be byte-level BPE"),
    ],
)
def test_damaged_files_are_refused_in_one_sentence(tmp_path, name, text, sentence):
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=sentence):
        Tokenizer.load(tmp_path)


def test_tokenizer_that_is_not_byte_level_is_refused(tmp_path):
    data = json.loads((TINY / "tokenizer.json").read_text())
    data["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="must be byte-level BPE"):
        Tokenizer.load(tmp_path)


def test_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.parity
def test_ids_agree_with_transformers():
    """F13: the template that ships, rendered by another implementation, in every cell."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(TINY)
    ours = ChatFormat(template=ChatTemplate.load(TINY), tokenizer=Tokenizer.load(TINY))
    for messages, tools, options in matrix():
        ids = ours.prompt(Chat(messages=messages, tools=tools, options=options)).ids
        for message in messages:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        same = theirs.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, return_dict=False, **options
        )
        assert same == ids
