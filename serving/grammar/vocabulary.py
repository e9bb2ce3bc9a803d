"""A tokenizer as llguidance needs it: the bytes of each token, and which are control tokens.

A control token never counts as text, so no JSON string and no regular expression can hold one.
Where a grammar spells one it is named by its id. Ids without bytes, padding among them, are never
allowed.
"""

import llguidance
import numpy as np

from minimax_jax.chat import Tokenizer

BITS = 32  # of a word of a packed mask


class GrammarVocabulary:
    """Masks are packed: uint32 words, token i at bit i % 32 of word i // 32."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        """`vocab_size` is the width of the logits, padding included."""
        if vocab_size < tokenizer.num_tokens:
            raise ValueError(
                f"vocab_size={vocab_size} is less than the {tokenizer.num_tokens} tokens of the "
                "tokenizer"
            )
        self.vocab_size = vocab_size
        self.num_words = -(-vocab_size // BITS)
        self.eos_ids = tokenizer.stop_ids
        self._tokenizer = tokenizer
        source = _Source(tokenizer)
        spelled = source.tokens[: tokenizer.num_tokens]
        self.valid = self.mask_of([token for token, text in enumerate(spelled) if text])
        self.engine = llguidance.LLTokenizer(source, eos_token=source.eos_token_id)  # type: ignore

    def has(self, token: int) -> bool:
        """Whether the id is a token of the tokenizer, no padding."""
        return 0 <= token < self._tokenizer.num_tokens

    def mask_of(self, token_ids: list[int]) -> np.ndarray:
        """The packed mask, uint32 [num_words], that allows just these tokens."""
        allowed = np.zeros(self.num_words * BITS, bool)
        allowed[token_ids] = True
        return np.packbits(allowed, bitorder="little").view("<u4")

    def unpack(self, masks: np.ndarray) -> np.ndarray:
        """Packed masks [..., num_words] as bool [..., vocab_size]."""
        octets = np.ascontiguousarray(masks, dtype="<u4").view(np.uint8)
        return np.unpackbits(octets, axis=-1, bitorder="little")[..., : self.vocab_size] == 1

    def control_id(self, text: str) -> int | None:
        """The id of the control token with just this text, or None."""
        return self._tokenizer.token_id(text) if _is_control(self._tokenizer, text) else None

    def split(self, text: str) -> list[str]:
        """`text` as runs without control tokens, and control tokens, empty runs left out."""
        pairs = self._tokenizer.control_tokens.split(text)
        return [piece for pair in pairs for piece in pair if piece]


class _Source:
    """What llguidance reads to build its trie of tokens."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer):
        count = tokenizer.num_tokens
        self.tokens = [tokenizer.token_bytes(token) for token in range(count)]
        texts = [spelled.decode("utf-8", errors="replace") for spelled in self.tokens]
        self.special_token_ids = [i for i, t in enumerate(texts) if _is_control(tokenizer, t)]
        # Stop tokens are the matcher's own business; the engine needs one that is no text.
        self.tokens.append(b"<end of the grammar>")
        self.eos_token_id = count
        self.special_token_ids.append(count)
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text.decode() if isinstance(text, bytes) else text)


def _is_control(tokenizer: Tokenizer, text: str) -> bool:
    return len(text) > 1 and next(tokenizer.control_tokens.split(text)) == ("", text)
