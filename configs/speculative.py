"""How a model speculates, under the keys of vLLM's `--speculative-config`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, Self

from configs.parts import CacheFormat, check

METHODS = ("dspark",)
SAMPLE_METHODS = ("probabilistic", "greedy")
_FORMATS: dict[str, CacheFormat] = {"f32": "f32", "bf16": "bf16", "fp8": "fp8", "nvfp4": "nvfp4"}
_FORMATS |= {"float32": "f32", "bfloat16": "bf16", "fp8_e4m3": "fp8"}  # vLLM's names of them


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding with the drafter of the checkpoint's own `dspark/` folder.

    The drafter always proposes its whole block; `num_speculative_tokens` of it are verified at
    most (None: all). `kv_cache_dtype` is the format of the draft part of the cache, "auto" that of
    the activations. `attention_backend` is accepted and chooses nothing: dispatch does.
    """

    method: Literal["dspark"] = "dspark"
    num_speculative_tokens: int | None = None
    draft_sample_method: Literal["probabilistic", "greedy"] = "probabilistic"
    kv_cache_dtype: str = "fp8"
    attention_backend: str | None = None

    def __post_init__(self) -> None:
        _one_of("method", self.method, METHODS)
        _one_of("draft_sample_method", self.draft_sample_method, SAMPLE_METHODS)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, ("auto", *_FORMATS))
        asked, backend = self.num_speculative_tokens, self.attention_backend
        sentence = f"num_speculative_tokens={asked!r} is not a whole number from 1 on"
        check(asked is None or (type(asked) is int and asked >= 1), sentence)
        named = backend is None or isinstance(backend, str)
        check(named, f"attention_backend={backend!r} is not a name")

    @classmethod
    def parse(cls, text: str) -> Self:
        """The config that a JSON object says.

        Raises ValueError with one sentence for what is no JSON object, an unknown key or a value
        that cannot be.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ValueError(f"the speculative config {text!r} is not JSON: {error}") from error
        check(isinstance(values, Mapping), f"the speculative config {text!r} is no JSON object")
        known = [field.name for field in fields(cls)]
        unknown = [key for key in values if key not in known]
        names = ", ".join(unknown)
        check(not unknown, f"the speculative config has no {names}; it has {', '.join(known)}")
        return cls(**values)

    def verified(self, draft_block: int) -> int:
        """How many of a drafter's `draft_block` drafts are verified at most."""
        asked = self.num_speculative_tokens
        if asked is None:
            return draft_block
        sentence = f"num_speculative_tokens={asked} is more than the drafter's {draft_block}"
        check(asked <= draft_block, sentence)
        return asked

    def cache_format(self, compute: CacheFormat) -> CacheFormat:
        """The format of the draft cache beside activations of format `compute`."""
        return compute if self.kv_cache_dtype == "auto" else _FORMATS[self.kv_cache_dtype]

    def described(self, draft_block: int) -> str:
        """One line for a log, in which `attention_backend` is answered."""
        line = (
            f"{self.method}, {self.verified(draft_block)} of {draft_block} drafts verified a step, "
            f"{self.draft_sample_method} drafts, {self.kv_cache_dtype} draft cache"
        )
        backend = self.attention_backend
        return line if backend is None else f"{line}; {backend}: dispatch chooses the kernels"


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    known = isinstance(value, str) and value in choices
    check(known, f"{name}={value!r} is not one of {', '.join(choices)}")
