"""Prompts of random tokens: with a prefix that all share, or one of several prefixes in turn."""

from collections.abc import Iterator

import numpy as np

from serving.bench.asks import Ask
from serving.bench.options import Dataset
from serving.bench.words import Words


def random_asks(dataset: Dataset, words: Words, count: int, seed: int) -> list[Ask]:
    """`random` of vLLM: `random_prefix_len` shared tokens, then as many of a request's own as
    `random_input_len` says, up to `random_range_ratio` of it more or less.
    """
    random = np.random.default_rng(seed)
    prefix = words.draw(random, dataset.random_prefix_len)
    ratio = dataset.random_range_ratio
    inputs = _lengths(random, dataset.random_input_len, ratio, count)
    outputs = _lengths(random, dataset.random_output_len, ratio, count)
    return [
        Ask(
            request_id=f"bench-{seed}-{place}",
            segments=(words.segment("user", prefix + words.draw(random, own)),),
            max_tokens=answer,
        )
        for place, (own, answer) in enumerate(zip(inputs, outputs, strict=True))
    ]


def prefix_repetition_asks(dataset: Dataset, words: Words, count: int, seed: int) -> list[Ask]:
    """`prefix_repetition` of vLLM, the requests of the prefixes mixed."""
    random = np.random.default_rng(seed)
    num_prefixes = dataset.prefix_repetition_num_prefixes
    lengths = (dataset.prefix_repetition_prefix_len, dataset.prefix_repetition_suffix_len)
    prefixes = [words.draw(random, lengths[0]) for _ in range(num_prefixes)]
    chosen = random.permutation([place % num_prefixes for place in range(count)])
    return [
        Ask(
            request_id=f"bench-{seed}-{place}",
            segments=(words.segment("user", prefixes[which] + words.draw(random, lengths[1])),),
            max_tokens=dataset.prefix_repetition_output_len,
        )
        for place, which in enumerate(chosen)
    ]


def _lengths(random: np.random.Generator, length: int, ratio: float, count: int) -> Iterator[int]:
    """Uniform from length (1 - ratio) to length (1 + ratio), both among them."""
    low, high = max(1, int(length * (1 - ratio))), int(length * (1 + ratio))
    return iter(random.integers(low, high, size=count, endpoint=True).tolist())
