"""How a request is sampled and where it ends: the options of one request, named as in vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

MAX_N = 128  # sequences of one request; a larger number is a mistake more often than a wish
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """What the text has to match; a JSON schema, a regular expression, a grammar in EBNF, or the
    gateway's structural tags. `from_first_token` binds the thought as well.
    """

    kind: Literal["json", "regex", "grammar", "structural_tag", "choice"]
    text: str
    from_first_token: bool = False


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The options of one request. Temperature 0 is greedy; top_k 0 or -1, top_p 1 and min_p 0
    switch off. `max_tokens` None means up to the model's length. Raises ValueError with a sentence.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutput | None = None

    def __post_init__(self) -> None:
        _check_counts(self)
        _check_shape(self)
        _check_penalties(self)
        _check_texts(self)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the next one's distribution."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1)
        return any(penalties)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ValueError when a token id named here is not in the vocabulary."""
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            for token in getattr(self, name):
                if not 0 <= token < vocab_size:
                    raise ValueError(f"{name} names token {token}, not in 0..{vocab_size - 1}")


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
    if params.seed is not None and not 0 <= params.seed <= MAX_SEED:
        raise ValueError(f"seed={params.seed} is not in 0..2^63-1")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and value < 0:
            raise ValueError(f"{name}={value} is negative; those of a whole vocabulary are not had")
    if params.max_tokens is not None:
        least = 1 if params.prompt_logprobs is None else 0
        if params.max_tokens < least:
            why = "" if params.max_tokens < 0 else "; 0 goes with prompt_logprobs only"
            raise ValueError(f"max_tokens={params.max_tokens} is not at least {least}{why}")
    most = float("inf") if params.max_tokens is None else params.max_tokens
    if not 0 <= params.min_tokens <= most:
        raise ValueError(f"min_tokens={params.min_tokens} is not in 0..max_tokens={most}")
    truncate = params.truncate_prompt_tokens
    if truncate is not None and truncate != -1 and truncate < 1:
        raise ValueError(f"truncate_prompt_tokens={truncate} is neither -1 nor at least 1")


def _check_shape(params: SamplingParams) -> None:
    if not 0 <= params.temperature < float("inf"):
        raise ValueError(f"temperature={params.temperature} is not a number from 0 on")
    if not 0 < params.top_p <= 1:
        raise ValueError(f"top_p={params.top_p} is not in (0, 1]")
    if params.top_k < -1:
        raise ValueError(f"top_k={params.top_k} is neither -1, 0 nor a number of tokens")
    if not 0 <= params.min_p <= 1:
        raise ValueError(f"min_p={params.min_p} is not in [0, 1]")


def _check_penalties(params: SamplingParams) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        if not -2 <= value <= 2:
            raise ValueError(f"{name}={value} is not in [-2, 2]")
    if not 0 < params.repetition_penalty < float("inf"):
        raise ValueError(f"repetition_penalty={params.repetition_penalty} is not above 0")
    for token, bias in params.logit_bias.items():
        if not -100 <= bias <= 100:
            raise ValueError(f"logit_bias of token {token} is {bias}, not in [-100, 100]")


def _check_texts(params: SamplingParams) -> None:
    for name in ("stop", "bad_words"):
        texts = getattr(params, name)
        if isinstance(texts, str):
            raise ValueError(f"{name}={texts!r} is one text, not a tuple of texts")
        if not all(texts):
            raise ValueError(f"{name}={texts!r} has an empty text")
