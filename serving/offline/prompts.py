"""What callers hand in: prompts in their several forms, and options as keywords."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minimax_jax.chat import Tokenizer

PromptLike = str | Sequence[int] | Mapping[str, Any]  # the last: {"prompt"} or {"prompt_token_ids"}


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt's ids, its text if it came as one, and what keeps its cached blocks apart."""

    text: str | None
    ids: Sequence[int]
    salt: str = ""


def read_prompts(
    given: PromptLike | Sequence[PromptLike], tokenizer: Tokenizer | None
) -> list[Prompt]:
    """One prompt or several. Raises ValueError for what is none."""
    if isinstance(given, (str, Mapping)):
        return [_read(given, tokenizer)]
    if len(given) and all(map(_is_id, given)):
        return [_read(given, tokenizer)]
    return [_read(one, tokenizer) for one in given]


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raises ValueError for an id outside the vocabulary."""
    for bad in (token for token in ids if not 0 <= token < vocab_size):
        raise ValueError(f"the prompt has token {bad}, not in 0..{vocab_size - 1}")


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Keywords as flags of the command: `max_model_len=2048` is `--max-model-len 2048`."""
    arguments = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            text = json.dumps(value) if isinstance(value, Mapping) else str(value)
            arguments += [f"--{flag}", text]
    return arguments


def _read(given: Any, tokenizer: Tokenizer | None) -> Prompt:
    if isinstance(given, Mapping):
        return _read_mapping(given, tokenizer)
    if not isinstance(given, str):
        if not isinstance(given, Sequence) or not all(map(_is_id, given)):
            raise ValueError(f"a prompt of type {type(given).__name__} is neither text nor ids")
        return Prompt(text=None, ids=[int(token) for token in given])
    if tokenizer is None:
        raise ValueError("this model has no tokenizer: give prompts as token ids")
    return Prompt(text=given, ids=tokenizer.encode(given))


def _read_mapping(given: Mapping[str, Any], tokenizer: Tokenizer | None) -> Prompt:
    forms = given.keys() & {"prompt", "prompt_token_ids"}
    unknown = given.keys() - {"prompt", "prompt_token_ids", "cache_salt"}
    if unknown or len(forms) != 1:
        raise ValueError(
            f"a prompt has {sorted(given)}; it takes one of prompt and prompt_token_ids, and "
            "cache_salt"
        )
    (form,) = forms
    inner = _read(given[form], tokenizer)
    return Prompt(text=inner.text, ids=inner.ids, salt=given.get("cache_salt", ""))


def _is_id(given: Any) -> bool:
    return isinstance(given, (int, np.integer))
