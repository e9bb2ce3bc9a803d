"""Weights into tensor files: the tensors that a weight becomes, shards and index, all or nothing.

Names are the released files' (spec/model 3). An NVFP4 matrix whose outer scale divides is written
with compressed-tensors' names, one whose scale multiplies with ModelOpt's: both bit for bit.
"""

import json
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minimax_jax.checkpoint.files import INDEX, SINGLE
from minimax_jax.checkpoint.tensor_file import DTYPES, Entry, Spec, Writer
from minimax_jax.quantize import (
    Form,
    Format,
    Weight,
    form_in,
    form_of,
    is_router,
    to_form,
    with_dividing_scale,
)
from pallas_kernels.layouts import mxfp8, nvfp4

MAX_SHARD_BYTES = 5 * 10**9
Progress = Callable[[str, int], None]  # a tensor's name, its bytes


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How a matrix is stored: its form, the dtype if it is plain, the convention if it is NVFP4."""

    form: Form
    dtype: np.dtype = DTYPES["F32"]
    divides: bool = True

    @classmethod
    def of(cls, weight: Weight) -> "Kind":
        """The kind that a weight has now."""
        form = form_of(weight)
        if form == "plain":
            return cls(form=form, dtype=np.dtype(weight.dtype))
        return cls(form=form, divides=form != "nvfp4" or weight.divides)

    def wanted(self, path: str, name: Format | None) -> "Kind":
        """What this kind becomes in a format, with the released dtypes; None changes nothing."""
        if name is None:
            return self
        plain = DTYPES["F32" if is_router(path) else "BF16"]
        return Kind(form=form_in(path, name), dtype=plain)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Tensors that go into one shard together; `produce` gives their values, in order."""

    specs: tuple[Spec, ...]
    produce: Callable[[], Iterable[np.ndarray]]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(spec.nbytes for spec in self.specs)


def specs(name: str, shape: tuple[int, ...], kind: Kind) -> tuple[Spec, ...]:
    """The tensors of a matrix (or vector) named `name`."""
    *rows, width = shape
    if kind.form == "plain":
        tensors = [(name, kind.dtype, shape)]
    elif kind.form == "mxfp8":
        exponents = (*rows, width // mxfp8.GROUP)
        tensors = [
            (name, DTYPES["F8_E4M3"], shape),
            (f"{name}_scale_inv", DTYPES["U8"], exponents),
        ]
    else:
        codes, outer = f"{name}_packed" if kind.divides else name, "global_scale"
        tensors = [
            (codes, DTYPES["U8"], (*rows, width // 2)),
            (f"{name}_scale", DTYPES["F8_E4M3"], (*rows, width // nvfp4.GROUP)),
            (f"{name}_{outer if kind.divides else 'scale_2'}", DTYPES["F32"], (1,)),
        ]
    return tuple(Spec(name=n, dtype=dtype, shape=tuple(s)) for n, dtype, s in tensors)


def arrays(weight: Weight, kind: Kind) -> list[np.ndarray]:
    """One matrix (or vector) in a kind: the arrays of `specs`, on the host."""
    stored = to_form(weight, kind.form)
    if kind.form == "plain":
        return [np.asarray(stored).astype(kind.dtype)]
    if kind.form == "mxfp8":
        return [np.asarray(stored.codes), np.asarray(stored.exponents)]
    if kind.divides and not stored.divides:
        stored = with_dividing_scale(stored)
    outer = np.asarray(stored.outer).reshape(1)
    return [np.asarray(stored.codes), np.asarray(stored.scales), outer]


def copied(entry: Entry, name: str | None = None) -> Group:
    """A tensor of another checkpoint, byte for byte."""
    spec = Spec(name=name or entry.name, dtype=entry.dtype, shape=entry.shape)
    return Group(specs=(spec,), produce=lambda: [entry.read()])


def write_files(
    folder: Path,
    groups: Sequence[Group],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """`model.safetensors`, or an index and shards of at most `max_shard_bytes`, or of one group."""
    shards = _shards(groups, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        name = SINGLE if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
        with Writer(folder / name, [spec for group in shard for spec in group.specs]) as writer:
            for group in shard:
                for spec, values in zip(group.specs, group.produce(), strict=True):
                    writer.write(spec.name, values)
                    if progress is not None:
                        progress(spec.name, spec.nbytes)
        weight_map |= {spec.name: name for group in shard for spec in group.specs}
    if len(shards) > 1:
        total = {"total_size": sum(group.nbytes for group in groups)}
        index = {"metadata": total, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")


@contextmanager
def all_or_nothing(folder: Path) -> Iterator[Path]:
    """A folder beside `folder`, which takes its name at the end, or vanishes if anything fails.

    Raises ValueError if there is something at `folder` already, other than an empty folder.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already and is not an empty folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.parent / f".{folder.name}.{secrets.token_hex(4)}.partial"
    partial.mkdir()
    try:
        yield partial
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _shards(groups: Sequence[Group], max_bytes: int) -> list[list[Group]]:
    shards: list[list[Group]] = []
    size = max_bytes
    for group in groups:
        if not shards or size + group.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(group)
        size += group.nbytes
    return shards
