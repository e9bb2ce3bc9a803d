"""Bad words as token sequences, for `SamplingParams.bad_words`."""

from collections.abc import Iterable

from minimax_jax.chat import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The ids of each word as a text may begin with it, and as it follows a space (as in vLLM).

    A spelling that ends in another one is left out: forbidding the shorter forbids it too. Raises
    ValueError for a word that is nothing but spaces.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        bare = word.lstrip()
        if not bare:
            raise ValueError(f"bad_words has {word!r}, which is nothing but spaces")
        plain, spaced = (tuple(tokenizer.encode(text)) for text in (bare, f" {bare}"))
        found.append(plain)
        if spaced[-len(plain) :] != plain:
            found.append(spaced)
    return tuple(dict.fromkeys(found))
