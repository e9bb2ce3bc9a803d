"""The files by which a gateway builds a model's tokenizer and prompts, as one archive.

The gateway takes at most 50 entries, 200 MB packed and 500 MB unpacked (specification serving
1.3). Equal files give equal bytes: no times or owners are in it.
"""

import hashlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

PATTERNS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("config.json", "generation_config.json", "preprocessor_config.json"),
    *("chat_template.json", "*.jinja"),
)
MAX_ENTRIES = 50
MAX_PACKED_BYTES = 200 * 10**6
MAX_UNPACKED_BYTES = 500 * 10**6
PIECE_BYTES = 64 << 10
_EARLIEST = (1980, 1, 1, 0, 0, 0)  # that the format can hold


@dataclass(frozen=True, kw_only=True)
class TokenizerZip:
    """An archive and the SHA-256 of its bytes in hexadecimal."""

    data: bytes
    sha256: str

    def pieces(self) -> Iterator[bytes]:
        """The bytes in order, at most 64 KiB each."""
        for start in range(0, len(self.data), PIECE_BYTES):
            yield self.data[start : start + PIECE_BYTES]


def pack(folder: Path, *, max_unpacked_bytes: int = MAX_UNPACKED_BYTES) -> TokenizerZip:
    """Packs a checkpoint folder's files. Raises ValueError without a tokenizer or over a limit."""
    paths = _files(folder)
    total = sum(path.stat().st_size for path in paths)
    if total > max_unpacked_bytes:
        raise ValueError(
            f"the tokenizer files of {folder.name} have {total} bytes, at most "
            f"{max_unpacked_bytes} can be sent"
        )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in paths:
            entry = zipfile.ZipInfo(path.name, _EARLIEST)
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    data = buffer.getvalue()
    if len(data) > MAX_PACKED_BYTES:
        raise ValueError(
            f"the packed tokenizer files of {folder.name} have {len(data)} bytes, at most "
            f"{MAX_PACKED_BYTES} can be sent"
        )
    return TokenizerZip(data=data, sha256=hashlib.sha256(data).hexdigest())


def _files(folder: Path) -> list[Path]:
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    paths = [path for path in paths if any(fnmatch(path.name, one) for one in PATTERNS)]
    if "tokenizer.json" not in {path.name for path in paths}:
        raise ValueError(f"{folder.name} has no tokenizer.json")
    if len(paths) > MAX_ENTRIES:
        raise ValueError(
            f"{folder.name} has {len(paths)} tokenizer and template files, at most "
            f"{MAX_ENTRIES} can be sent"
        )
    return paths
