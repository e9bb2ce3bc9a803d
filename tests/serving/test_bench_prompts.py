"""What is asked: random prompts and prompts of a file."""

import json

import pytest

from minimax_jax.chat import ChatFormat, ChatTemplate, Tokenizer
from serving.bench.client import Facts
from serving.bench.options import Dataset
from serving.bench.prompt_files import PromptFile
from serving.bench.random_prompts import prefix_repetition_asks, random_asks
from serving.bench.words import Words
from tests.chat.folders import TINY

WORDS = Words(Facts(model="m", vocab_size=500), None)
TOKENIZER = Tokenizer.load(TINY)
FORMAT = ChatFormat(template=ChatTemplate.load(TINY), tokenizer=TOKENIZER)


def ids(ask) -> list[int]:
    return list(ask.ids)


def test_random_prompts_share_their_prefix_and_nothing_else():
    asked = random_asks(Dataset(random_input_len=50, random_prefix_len=30), WORDS, 8, seed=3)
    assert len({tuple(ids(one)[:30]) for one in asked}) == 1
    assert len({tuple(ids(one)[30:40]) for one in asked}) == 8
    assert {len(ids(one)) for one in asked} == {80}
    assert {one.max_tokens for one in asked} == {128}


def test_random_prompts_of_a_seed_are_the_same():
    one, same, other = (random_asks(Dataset(), WORDS, 3, seed=seed) for seed in (1, 1, 2))
    assert list(map(ids, one)) == list(map(ids, same))
    assert ids(one[0])[:20] != ids(other[0])[:20]


def test_prefixes_are_repeated_equally_often():
    dataset = Dataset(
        dataset_name="prefix_repetition",
        prefix_repetition_prefix_len=40,
        prefix_repetition_suffix_len=10,
        prefix_repetition_num_prefixes=4,
    )
    asked = prefix_repetition_asks(dataset, WORDS, 20, seed=0)
    prefixes = [tuple(ids(one)[:40]) for one in asked]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [5, 5, 5, 5]
    assert len({tuple(ids(one)) for one in asked}) == 20


def lines_file(tmp_path, *rows) -> str:
    path = tmp_path / "prompts.jsonl"
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(texts), "utf-8")
    return str(path)


def custom(path: str, **more) -> Dataset:
    return Dataset(dataset_name="custom", dataset_path=path, disable_shuffle=True, **more)


def test_lines_are_asked_in_order_and_again_when_the_file_is_short(tmp_path):
    path = lines_file(tmp_path, {"prompt": "a b", "output_tokens": 7}, {"prompt": "c\u2028d"}, "")
    dataset = custom(path, custom_output_len=9)
    asked = PromptFile(dataset, tokenizer=None, template=None).asks(5, seed=0)
    assert [one.text for one in asked] == ["a b", "c\u2028d", "a b", "c\u2028d", "a b"]
    assert [one.max_tokens for one in asked] == [7, 9, 7, 9, 7]
    assert len({one.request_id for one in asked}) == 5
    assert asked[0].ids is None


def test_a_tokenizer_gives_ids_and_a_template_makes_a_chat_of_it(tmp_path):
    dataset = custom(lines_file(tmp_path, {"prompt": "How many?"}))
    plain = PromptFile(dataset, tokenizer=TOKENIZER, template=None).asks(1, seed=0)[0]
    assert ids(plain) == TOKENIZER.encode("How many?")
    chat = PromptFile(dataset, tokenizer=TOKENIZER, template=FORMAT).asks(1, seed=0)[0]
    assert ids(chat) == TOKENIZER.encode(chat.text or "")
    assert "How many?" in (chat.text or "") and chat.text != "How many?"
    skipped = custom(lines_file(tmp_path, {"prompt": "How many?"}), skip_chat_template=True)
    assert PromptFile(skipped, tokenizer=TOKENIZER, template=FORMAT).asks(1, 0)[0] == plain


def test_a_file_is_shuffled_by_the_seed(tmp_path):
    path = lines_file(tmp_path, *({"prompt": str(place)} for place in range(50)))
    dataset = Dataset(dataset_name="custom", dataset_path=path)
    file = PromptFile(dataset, tokenizer=None, template=None)
    orders = [[one.text for one in file.asks(50, seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


def test_sharegpt_gives_the_first_question_and_the_length_of_its_answer(tmp_path):
    rows = [
        {"conversations": [{"value": "How many eggs are left?"}, {"value": "There are many left"}]},
        {"conversations": [{"value": "Hi"}, {"value": "Hello, how are you?"}]},
        {"conversations": [{"value": "How many eggs are alone?"}]},
    ]
    path = tmp_path / "share.json"
    path.write_text(json.dumps(rows), "utf-8")
    dataset = Dataset(dataset_name="sharegpt", dataset_path=str(path))
    asked = PromptFile(dataset, tokenizer=TOKENIZER, template=None).asks(2, seed=0)
    assert {one.text for one in asked} == {"How many eggs are left?"}
    assert asked[0].max_tokens == len(TOKENIZER.encode("There are many left"))
    fixed = Dataset(dataset_name="sharegpt", dataset_path=str(path), sharegpt_output_len=11)
    assert PromptFile(fixed, tokenizer=None, template=None).asks(1, 0)[0].max_tokens == 11


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        (["{"], "line 1 of .* is not JSON"),
        ([{"prompt": "a"}, {"text": "b"}], "line 2 of .* is not an object with a text `prompt`"),
        ([[1]], "line 1 of .* is not an object"),
        ([{"prompt": "a", "output_tokens": 0}], "line 1 of .*output_tokens=0 is no length"),
        ([{"prompt": "a", "output_tokens": True}], "output_tokens=True is no length"),
        ([""], "holds no prompt of use"),
    ],
)
def test_a_bad_file_is_a_sentence_that_names_the_line(tmp_path, rows, complaint):
    with pytest.raises(ValueError, match=complaint):
        dataset = custom(lines_file(tmp_path, *rows))
        PromptFile(dataset, tokenizer=None, template=None).asks(1, seed=0)


def test_a_file_that_is_not_there_is_a_sentence():
    with pytest.raises(ValueError, match="dataset_path='/no/such' cannot be read"):
        PromptFile(custom("/no/such"), tokenizer=None, template=None)


def test_a_sharegpt_file_of_another_form_is_a_sentence(tmp_path):
    path = tmp_path / "share.json"
    path.write_text('{"conversations": []}', "utf-8")
    dataset = Dataset(dataset_name="sharegpt", dataset_path=str(path))
    with pytest.raises(ValueError, match="is not a list of conversations"):
        PromptFile(dataset, tokenizer=None, template=None)
