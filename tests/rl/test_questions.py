"""Published files are read in their forms, each prompt once; questions come in an order that a
number alone decides.
"""

import json

import pyarrow
import pytest
from pyarrow import parquet

from rl.questions import (
    INSTRUCTION,
    Question,
    Shuffled,
    file_questions,
    measured_questions,
    training_questions,
)

CHAT = [{"role": "user", "content": "What is 6 times 7?"}]


def written(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path


@pytest.mark.parametrize(
    ("record", "answer", "bare"),
    [
        ({"prompt": CHAT, "label": "42"}, "42", False),
        ({"prompt": CHAT, "reward_model": {"ground_truth": "42", "style": "rule"}}, "42", False),
        ({"problem": "What is 6 times 7?", "answer": 42, "solution": "long"}, "42", True),
        ({"question": "What is 6 times 7?", "answer": "6*7=42\n#### 42"}, "42", True),
        ({"prompt": "What is 6 times 7?", "label": "-3"}, "-3", True),
    ],
)
def test_the_published_forms_of_json_lines(tmp_path, record, answer, bare):
    (found,) = file_questions(written(tmp_path / "set.jsonl", record))
    assert found.answer == answer
    expected = f"{CHAT[0]['content']}\n\n{INSTRUCTION}" if bare else CHAT[0]["content"]
    assert found.messages == ({"role": "user", "content": expected},)
    assert found.source == "set"


def test_parquet_as_published_with_its_repeats(tmp_path):
    """DAPO-Math-17K: one prompt many times, each time with another index."""
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": f"Problem {i % 3}"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(i % 3), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": str(i)},
        }
        for i in range(12)
    ]
    path = tmp_path / "dapo-math-17k.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    found = file_questions(path)
    assert [(q.messages[0]["content"], q.answer) for q in found] == [
        ("Problem 0", "0"),
        ("Problem 1", "1"),
        ("Problem 2", "2"),
    ]
    assert {q.source for q in found} == {"math_dapo"}


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.csv", "", "a.csv is neither .jsonl nor .parquet"),
        ("a.jsonl", "", "a.jsonl holds no problems"),
        ("a.jsonl", '{"a": 1}\n{"b"\n', "row 1 has the fields a, and not those of"),
        ("a.jsonl", '{"prompt": "a", "label": "1"}\n{"b"\n', "line 2, is not JSON"),
        ("a.jsonl", '{"prompt": "a", "label": ""}', "row 1 has the fields prompt, label"),
        ("a.jsonl", "[1]", "row 1 is no object but list"),
        ("a.parquet", "PAR?", "a.parquet is not Parquet"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path, name, text, sentence):
    (tmp_path / name).write_text(text, "utf-8")
    with pytest.raises(ValueError, match=sentence):
        file_questions(tmp_path / name)


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"there is no file .*gone.jsonl"):
        training_questions(str(tmp_path / "gone.jsonl"), 0)


def some(count, seed):
    questions = [Question(messages=(), answer=str(i), source="set") for i in range(count)]
    return Shuffled(questions=questions, seed=seed)


def test_each_epoch_asks_everything_once_in_an_order_of_its_own():
    """F174: the order is a function of the number, so a resumed run goes on anywhere."""
    answers = [int(some(10, 0).at(i).answer) for i in range(30)]
    epochs = [answers[:10], answers[10:20], answers[20:]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [int(some(10, 0).at(i).answer) for i in (7, 23)] == [answers[7], answers[23]]
    assert [some(10, 1).at(i).answer for i in range(10)] != [str(a) for a in epochs[0]]


def test_other_data_has_another_identity():
    assert some(10, 0).identity == some(10, 0).identity
    assert len({some(10, 0).identity, some(11, 0).identity, some(10, 1).identity}) == 3


def test_training_and_measured_arithmetic_have_no_question_in_common():
    training = training_questions("arithmetic", 0)
    asked = {training.at(i).messages[0]["content"] for i in range(500)}
    measured = {q.messages[0]["content"] for q in measured_questions("arithmetic", 500)}
    assert len(measured) > 400 and not asked & measured


def test_families_that_are_named_are_asked_for_and_no_others():
    found = [training_questions("arithmetic:sum,sum", 0).at(i) for i in range(20)]
    assert all(question.answer.isdigit() for question in found)
    texts = [question.messages[0]["content"] for question in found]
    assert all("+" in text or "plus" in text or "Add" in text for text in texts)
    assert len(measured_questions("arithmetic:chain", 3)) == 3
    with pytest.raises(ValueError, match=r"unknown families \['sums'\]: name some of sum, "):
        training_questions("arithmetic:sums", 0)
