"""Prompts from a file: a ShareGPT JSON, or JSON lines with `prompt` and maybe `output_tokens`."""

import json
from array import array
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from minimax_jax.chat import Chat, ChatFormat, Tokenizer
from serving.bench.asks import Ask, Segment
from serving.bench.options import Dataset

LEAST_TOKENS = 4  # of prompt and answer: shorter ones of ShareGPT are left out, as vLLM does
CHARACTERS_A_TOKEN = 4  # for an answer's length where no tokenizer is at hand


class PromptFile:
    """The prompts of a dataset's file. A prompt is the user's message: sent as such to a chat, and
    elsewhere rendered with the template, where one is at hand, or as it is.
    """

    def __init__(
        self, dataset: Dataset, *, tokenizer: Tokenizer | None, template: ChatFormat | None
    ):
        assert dataset.dataset_path is not None
        self._dataset, self._tokenizer = dataset, tokenizer
        self._template = None if dataset.skip_chat_template else template
        read = _read_sharegpt if dataset.dataset_name == "sharegpt" else _read_lines
        self._rows = list(read(Path(dataset.dataset_path)))

    def asks(self, count: int, seed: int) -> list[Ask]:
        """So many requests, in a random order unless that is off; a short file is repeated."""
        rows = [row for row in map(self._ask, self._rows) if row is not None]
        if not rows:
            raise ValueError(f"dataset_path={self._dataset.dataset_path!r} holds no prompt of use")
        if not self._dataset.disable_shuffle:
            order = np.random.default_rng(seed).permutation(len(rows))
            rows = [rows[place] for place in order]
        return [
            Ask(request_id=f"bench-{seed}-{place}", segments=(segment,), max_tokens=length)
            for place, (segment, length) in enumerate(islice(cycle(rows), count))
        ]

    def _ask(self, row: tuple[str, str | int | None]) -> tuple[Segment, int] | None:
        """A prompt and the length of its answer; None for one too short to be of use."""
        prompt, recorded = row
        segment = self._segment(prompt)
        if not isinstance(recorded, str):
            return segment, recorded or self._dataset.custom_output_len
        length = self._dataset.sharegpt_output_len or self._num_tokens(recorded)
        too_short = min(self._num_tokens(prompt), length) < LEAST_TOKENS
        return None if too_short else (segment, length)

    def _segment(self, prompt: str) -> Segment:
        if self._template is not None:
            chat = Chat(messages=[{"role": "user", "content": prompt}])
            rendered = self._template.prompt(chat)
            return Segment(ids=array("i", rendered.ids), text=rendered.text)
        if self._tokenizer is None:
            return Segment(text=prompt)
        return Segment(ids=array("i", self._tokenizer.encode(prompt)), text=prompt)

    def _num_tokens(self, text: str) -> int:
        if self._tokenizer is None:
            return -(-len(text) // CHARACTERS_A_TOKEN)
        return len(self._tokenizer.encode(text))


def _read_sharegpt(path: Path) -> Iterator[tuple[str, str]]:
    """The first message of each conversation and the answer to it."""
    rows = _json(_read(path), path)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} is not a list of conversations")
    for row in rows:
        turns = [turn.get("value") for turn in row.get("conversations") or ()]
        if len(turns) >= 2 and all(isinstance(turn, str) for turn in turns[:2]):
            yield turns[0], turns[1]


def _read_lines(path: Path) -> Iterator[tuple[str, int | None]]:
    for number, line in enumerate(_read(path).split("\n"), 1):
        if not line.strip():
            continue
        row = _json(line, f"line {number} of {path}")
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise ValueError(f"line {number} of {path} is not an object with a text `prompt`")
        length = row.get("output_tokens")
        if not (length is None or (type(length) is int and length > 0)):
            raise ValueError(f"line {number} of {path}: output_tokens={length!r} is no length")
        yield row["prompt"], length


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"dataset_path={str(path)!r} cannot be read: {error}") from error


def _json(text: str, where: object) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
