"""Text to token ids and back, over the `tokenizers` library and a checkpoint's tokenizer.json.

Byte-level BPE alone (M3, M3.1 and the bundled model): there each token stands for a fixed run of
bytes, so decoding is concatenation.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from minimax_jax.chat.control_tokens import ControlTokens
from minimax_jax.chat.rendered import Rendered

TURN_END = "[e~["


class Tokenizer:
    """Encodes without adding a BOS, which the chat template writes; decodes markers as text."""

    def __init__(self, backend: tokenizers.Tokenizer, stop_ids: Sequence[int] | None = None):
        """`stop_ids` default to the end-of-turn marker `[e~[`, where the vocabulary has it."""
        self._backend = backend
        self._token_bytes = _token_bytes(backend)
        added = backend.get_added_tokens_decoder()
        self._control_ids = {token.content: token_id for token_id, token in added.items()}
        self.control_tokens = ControlTokens(self._control_ids)
        # Of them, those that a reader's text leaves out. M3's markers are not: parsers need them.
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        turn_end = backend.token_to_id(TURN_END)
        default = () if turn_end is None else (turn_end,)
        self.stop_ids: tuple[int, ...] = tuple(default if stop_ids is None else stop_ids)

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Reads tokenizer.json, and `eos_token_id` of generation_config.json or config.json."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{folder} holds no tokenizer: expected a file tokenizer.json")
        _check_file(path)
        backend = tokenizers.Tokenizer.from_file(str(path))
        return cls(backend, _configured_stop_ids(Path(folder)))

    @property
    def num_tokens(self) -> int:
        """How many ids are valid, added tokens included; the vocabulary's later ids are padding."""
        return len(self._token_bytes)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; markers spelled in it become their own tokens, and no BOS is added."""
        _check_unicode(text)
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_rendered(self, rendered: Rendered) -> list[int]:
        """The ids of a prompt: control tokens without a mark are read as tokens, marked ones as the
        text that they are.
        """
        if rendered.mark not in rendered.marked:
            return self.encode(rendered.marked)
        _check_unicode(rendered.marked)
        ids: list[int] = []
        for run, token in self.control_tokens.split(rendered.marked):
            plain = run.replace(rendered.mark, "")
            ids += self.encode(run) if plain == run else self._encode_plain(plain)
            ids += [self._control_ids[token]] if token else []
        return ids

    def turn_ends(self, rendered: Rendered) -> list[int]:
        """The places in the marked text where a turn has ended: after each stop token."""
        stops = {self.decode([stop]) for stop in self.stop_ids}
        ends, place = [], 0
        for run, token in self.control_tokens.split(rendered.marked):
            place += len(run) + len(token)
            ends += [place] if token in stops else []
        return ends

    def _encode_plain(self, text: str) -> list[int]:
        """The ids of a text in which nothing is a control token."""
        normalizer, splitter = self._backend.normalizer, self._backend.pre_tokenizer
        text = text if normalizer is None else normalizer.normalize_str(text)
        words = [word for word, _ in splitter.pre_tokenize_str(text)] if splitter else [text]
        return [piece.id for word in words for piece in self._backend.model.tokenize(word)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, markers included; bytes that are no UTF-8 come out as U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; ValueError for a padding id."""
        if not 0 <= token_id < self.num_tokens:
            raise ValueError(
                f"token id {token_id} is not in the vocabulary of {self.num_tokens} tokens"
            )
        return self._token_bytes[token_id]

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact name (a marker such as `<mm:think>`), or None."""
        return self._backend.token_to_id(token)


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"the text is not valid Unicode: {error.reason}") from error


def byte_symbols() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte, and back (the table of GPT-2).

    Printable Latin-1 bytes stand for themselves, the others follow from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + index): byte for index, byte in enumerate(others)},
    }


def _token_bytes(backend: tokenizers.Tokenizer) -> list[bytes]:
    """The bytes of each id; an id without a token stands for none."""
    symbols = byte_symbols()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        known = all(character in symbols for character in token)
        # A marker with a space in it is no byte spelling: it stands for its own text.
        table[token_id] = bytes(map(symbols.__getitem__, token)) if known else token.encode("utf-8")
    return table


def _check_file(path: Path) -> None:
    """Refuses a tokenizer.json that is damaged or of another kind than byte-level BPE."""
    data = _read_object(path)
    kinds = [(data.get(part) or {}).get("type") for part in ("model", "decoder")]
    if kinds != ["BPE", "ByteLevel"]:
        raise ValueError(f"{path} must be byte-level BPE, found model and decoder {kinds}")
    for token in data.get("added_tokens") or ():
        flags = [flag for flag in ("single_word", "lstrip", "rstrip") if token.get(flag)]
        if flags or len(token["content"]) < 2:
            raise ValueError(
                f"{path} has the added token {token['content']!r} with {flags}: expected at least "
                "two characters that are found wherever they stand"
            )


def _configured_stop_ids(folder: Path) -> tuple[int, ...] | None:
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        config = _read_object(path) if path.is_file() else {}
        for part in (config, config.get("text_config") or {}):
            value = part.get("eos_token_id")
            if value is not None:
                return _stop_ids(value, path)
    return None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object, found a {type(config).__name__}")
    return config


def _stop_ids(value: Any, path: Path) -> tuple[int, ...]:
    ids = tuple(value) if isinstance(value, list) else (value,)
    if not all(type(token_id) is int for token_id in ids):
        raise ValueError(
            f"eos_token_id in {path} must be an integer or a list of them, found {value!r}"
        )
    return ids
