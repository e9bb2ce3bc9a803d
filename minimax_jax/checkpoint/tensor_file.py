"""The safetensors format, read and written: headers, and tensor bytes into buffers of our own.

The header (8 bytes of length, then JSON) is parsed here and not by the safetensors library, for
three reasons: its numpy side has neither bfloat16 nor float8; it maps files, and a mapped file that
is shorter than its header says reads as zeros (F03); and it hands out arrays of its own, so that
stacking 128 experts would hold them twice, and a file could only be written from tensors that are
all in memory. What the library checks is checked here too: header size, known dtypes, sizes that
match shapes, tensors that fill the file without gaps or overlaps. Nothing here runs or unpickles
anything.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
CHUNK_BYTES = 16 * 2**20  # read at a time where values are converted on the way
LEAST_BYTES = (
    4096  # that are read alone: systems read pages, and a call costs as much as copying one
)
SHOWN = 20
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
    "BOOL": np.dtype(np.bool_),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CheckpointError(ValueError):
    """Everything that is wrong with a checkpoint, at once; the text shows the first lines."""

    def __init__(self, folder: Path | str, problems: Iterable[str]):
        self.problems = tuple(dict.fromkeys(problems))
        lines = list(self.problems[:SHOWN])
        if len(self.problems) > SHOWN:
            lines.append(f"and {len(self.problems) - SHOWN} more")
        separator = " " if len(lines) == 1 else "\n  "
        super().__init__(separator.join([f"cannot read the checkpoint {folder}:", *lines]))


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A tensor to be written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Entry(Spec):
    """A tensor of a file, as the header describes it; `start` is its first byte in the file."""

    file: Path
    start: int

    def __str__(self) -> str:
        return f"{self.file.name}: {self.name}"

    @property
    def kind(self) -> str:
        """Dtype and shape in the header's words."""
        return f"{DTYPE_NAMES[self.dtype]} {list(self.shape)}"

    def read(self) -> np.ndarray:
        """The whole tensor, in its own dtype."""
        out = np.empty(self.shape, self.dtype)
        self.read_into(out)
        return out

    def read_into(self, out: np.ndarray, first: int = 0, step: int = 1, left: int = 0) -> int:
        """Rows first, first + step, ... into `out`, of each what lies from column `left` on; a row
        is the last axis, the others are flat. The bytes that were read.

        `out` is contiguous and decides how many rows and columns are read; where its dtype is
        another, values are cast in chunks. Of a part of a row that is shorter than `LEAST_BYTES`
        the whole row is read. Raises CheckpointError when the file ends too early.
        """
        rows = out.reshape(-1, out.shape[-1] if out.shape else 1)
        width = self.shape[-1] if self.shape else 1
        with self.file.open("rb") as file:
            if self.fills(out, step):
                file.seek(self.start + first * width * self.dtype.itemsize)
                return self._fill(file, rows)
            whole = rows.shape[1] * self.dtype.itemsize < LEAST_BYTES or rows.shape[1] == width
            read, columns = 0, width * step if whole else rows.shape[1]
            chunk = max(1, CHUNK_BYTES // (columns * self.dtype.itemsize))
            for begin in range(0, len(rows), chunk):
                some, at = rows[begin : begin + chunk], first + begin * step
                if whole:
                    read += self._fill_from_rows(file, some, at, step, left)
                else:
                    read += self._fill_by_row(file, some, at, step, left)
        return read

    def fills(self, out: np.ndarray, step: int = 1) -> bool:
        """Whether what `out` asks for lies in the file as it does in `out`."""
        width = self.shape[-1] if self.shape else 1
        whole = (out.shape[-1] if out.shape else 1) == width
        return step == 1 and out.dtype == self.dtype and whole

    def _fill(self, file: BufferedReader, rows: np.ndarray) -> int:
        view = rows.reshape(-1).view(np.uint8).data
        found = file.readinto(view) if view.nbytes else 0
        if found != view.nbytes:
            sentence = f"{self}: the file ends {view.nbytes - found} bytes too early"
            raise CheckpointError(self.file.parent, [sentence])
        return found

    def _fill_from_rows(
        self, file: BufferedReader, rows: np.ndarray, first: int, step: int, left: int
    ) -> int:
        """By way of all that lies from the first row to the last."""
        width = self.shape[-1] if self.shape else 1
        # What a step skips after the last row may lie beyond the end of the file.
        buffer = np.empty(((len(rows) - 1) * step + 1, width), self.dtype)
        file.seek(self.start + first * width * self.dtype.itemsize)
        found = self._fill(file, buffer)
        rows[:] = buffer[::step, left : left + rows.shape[1]]
        return found

    def _fill_by_row(
        self, file: BufferedReader, rows: np.ndarray, first: int, step: int, left: int
    ) -> int:
        """A part of each row, and nothing between."""
        buffer, found = np.empty(rows.shape, self.dtype), 0
        for i, row in enumerate(buffer):
            place = (first + i * step) * self.shape[-1] + left
            file.seek(self.start + place * self.dtype.itemsize)
            found += self._fill(file, row)
        rows[:] = buffer
        return found


def read_header(path: Path) -> list[Entry]:
    """The tensors of a file. ValueError with one sentence if it is no safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > MAX_HEADER_BYTES or length + 8 > size:
            raise ValueError(f"no safetensors file: {size} bytes, with a header of {length}")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"no safetensors file: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise ValueError("no safetensors file: its header is not a JSON object")
    header.pop("__metadata__", None)
    return [_entry(path, name, value, 8 + length) for name, value in header.items()]


def extent_problems(path: Path, entries: list[Entry]) -> list[str]:
    """Gaps, overlaps, and a file that is shorter or longer than its header says (F03)."""
    problems = []
    with path.open("rb") as file:
        end = 8 + int.from_bytes(file.read(8), "little")
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.nbytes)):
        if entry.start != end:
            problems.append(f"{entry} starts at byte {entry.start}, expected {end}")
        end = entry.start + entry.nbytes
    found = path.stat().st_size
    if found != end:
        problems.append(f"{path.name}: expected {end} bytes by its header, found {found} bytes")
    return problems


class Writer:
    """A safetensors file whose tensors are known at the start and written one by one, in any order.

    Wider dtypes come first, so that every tensor is aligned to its own width.
    """

    def __init__(self, path: Path, specs: Sequence[Spec]):
        ordered = sorted(specs, key=lambda spec: (-spec.dtype.itemsize, spec.name))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        self.offsets: dict[str, tuple[int, int]] = {}
        for spec in ordered:
            end = offset + spec.nbytes
            shape, dtype = list(spec.shape), DTYPE_NAMES[spec.dtype]
            header[spec.name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
            self.offsets[spec.name] = (offset, spec.nbytes)
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.start = 8 + len(text)
        self.file = path.open("wb")
        self.file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, values: np.ndarray) -> None:
        """A tensor's bytes, at its place."""
        offset, nbytes = self.offsets.pop(name)
        assert values.nbytes == nbytes, f"{name} has {values.nbytes} bytes, {nbytes} were announced"
        self.file.seek(self.start + offset)
        self.file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        """Ends the file; every announced tensor must be there."""
        self.file.close()
        assert failure or not self.offsets, f"never written: {', '.join(self.offsets)}"


def _entry(path: Path, name: str, value: Any, data_start: int) -> Entry:
    try:
        dtype, shape = DTYPES[value["dtype"]], tuple(int(n) for n in value["shape"])
        begin, end = (int(n) for n in value["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the header describes {name} as {value!r}") from error
    entry = Entry(name=name, dtype=dtype, shape=shape, file=path, start=data_start + begin)
    if min((*shape, begin)) < 0 or end - begin != entry.nbytes:
        raise ValueError(f"the header gives {name} {end - begin} bytes for {value!r}")
    return entry
