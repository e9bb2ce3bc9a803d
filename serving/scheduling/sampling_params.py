"""How a request is sampled and where it ends: the options of one request, named as in vLLM."""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from configs.sampling import MAX_SEED, TokenSampling, check_seed

MAX_N = 128  # sequences of one request; a larger number is a mistake more often than a wish


@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """What the text has to match; a JSON schema, a regular expression, a grammar in EBNF, or the
    gateway's structural tags. `from_first_token` binds the thought as well.
    """

    kind: Literal["json", "regex", "grammar", "structural_tag", "choice"]
    text: str
    from_first_token: bool = False


@dataclass(frozen=True, kw_only=True)
class SamplingParams(TokenSampling):
    """The options of one request. `max_tokens` None means up to the model's length. Raises
    ValueError with a sentence.
    """

    n: int = 1
    seed: int | None = None
    bad_words: tuple[str, ...] = ()
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutput | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_counts(self)
        _check_lengths(self)
        _check_texts(self)


def child_seed(seed: int, index: int) -> int:
    """The seed of sequence `index` of a request with n > 1. Sequence 0 has the request's own, so
    that it is what n = 1 gives.
    """
    if index == 0:
        return seed
    text = f"{seed}:{index}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") & MAX_SEED


def _check_counts(params: SamplingParams) -> None:
    if not 1 <= params.n <= MAX_N:
        raise ValueError(f"n={params.n} is not in 1..{MAX_N}")
    if params.seed is not None:
        check_seed(params.seed)
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and value < 0:
            raise ValueError(f"{name}={value} is negative; those of a whole vocabulary are not had")


def _check_lengths(params: SamplingParams) -> None:
    if params.max_tokens is not None:
        least = 1 if params.prompt_logprobs is None else 0
        if params.max_tokens < least:
            why = "" if params.max_tokens < 0 else "; 0 goes with prompt_logprobs only"
            raise ValueError(f"max_tokens={params.max_tokens} is not at least {least}{why}")
        if params.min_tokens > params.max_tokens:
            raise ValueError(
                f"min_tokens={params.min_tokens} is more than max_tokens={params.max_tokens}"
            )
    truncate = params.truncate_prompt_tokens
    if truncate is not None and truncate != -1 and truncate < 1:
        raise ValueError(f"truncate_prompt_tokens={truncate} is neither -1 nor at least 1")


def _check_texts(params: SamplingParams) -> None:
    for name in ("stop", "bad_words"):
        texts = getattr(params, name)
        if isinstance(texts, str):
            raise ValueError(f"{name}={texts!r} is one text, not a tuple of texts")
        if not all(texts):
            raise ValueError(f"{name}={texts!r} has an empty text")
