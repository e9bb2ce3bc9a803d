"""Files of mathematical problems as they are published: JSON lines or Parquet, in the forms of
DAPO-Math-17K and AIME (a chat with a ground truth or a label), or bare problems with answers.

The published DAPO-Math-17K holds each of its 17,398 problems about a hundred times (spec/rl 6.1):
a prompt that has been seen is left out.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GSM8K_ANSWER = "####"  # its answers are a derivation, then this and the number
PROBLEM_FIELDS = ("problem", "question")
ANSWER_FIELDS = ("answer", "label", "solution")
FORMS = (
    "{prompt, reward_model: {ground_truth}}, {prompt, label}, {problem, answer} "
    "or {question, answer}"
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One problem: as a chat, or as bare text (then `messages` is None)."""

    messages: tuple[dict[str, str], ...] | None
    problem: str
    answer: str
    source: str | None


def read_rows(path: Path) -> list[Row]:
    """The problems of a `.jsonl` or `.parquet` file in its order, each prompt once.

    Raises ValueError for another kind of file, one that is not there or empty, and a row without
    prompt or answer, with its number and its fields.
    """
    readers = {".jsonl": _json_lines, ".parquet": _parquet}
    if path.suffix not in readers:
        raise ValueError(f"{path} is neither {' nor '.join(readers)}")
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    rows: dict[str, Row] = {}
    for number, record in enumerate(readers[path.suffix](path), start=1):
        row = _row(record, f"{path}, row {number}")
        rows.setdefault(row.problem, row)
    if not rows:
        raise ValueError(f"{path} holds no problems")
    return list(rows.values())


def _json_lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                if line.strip():
                    yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}, is not JSON: {error}") from error


def _parquet(path: Path) -> Iterator[Any]:
    """Row by row: as published, DAPO-Math-17K has 1.8 million."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(
            f"{path} needs pyarrow to be read: pip install 'minimax-jax[math]'"
        ) from error
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not Parquet: {error}") from error


def _row(record: Any, where: str) -> Row:
    if not isinstance(record, Mapping):
        raise ValueError(f"{where} is no object but {type(record).__name__}")
    answer, prompt = _answer(record), record.get("prompt")
    if isinstance(prompt, str) or prompt is None:
        problem = prompt or next((record[n] for n in PROBLEM_FIELDS if record.get(n)), None)
        messages = None
    else:
        messages = tuple({"role": m["role"], "content": m["content"]} for m in prompt)
        problem = "\n".join(message["content"] for message in messages)
    if not problem or answer is None:
        raise ValueError(f"{where} has the fields {', '.join(record)}, and not those of {FORMS}")
    source = record.get("data_source")
    return Row(messages=messages, problem=str(problem), answer=answer, source=source)


def _answer(record: Mapping[str, Any]) -> str | None:
    graded = record.get("reward_model") or {}
    found = [graded.get("ground_truth"), *(record.get(name) for name in ANSWER_FIELDS)]
    answer = next((str(value) for value in found if value not in (None, "")), None)
    if answer is not None and GSM8K_ANSWER in answer:
        answer = answer.rpartition(GSM8K_ANSWER)[2]
    return None if answer is None else answer.strip().replace("\n", " ")
