"""A leaf out of its files, by parts (values; codes and exponents; codes, scales and outer scale),
onto its devices.

The one place that undoes a file's layout (`names.Layout`): experts are stacked one by one into the
caller's buffer, and fused gate and up rows are taken apart. Of a sharded leaf a process reads the
slices of its own devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from minimax_jax.checkpoint.plan import LeafPlan
from minimax_jax.checkpoint.slices import Bounds, readings
from minimax_jax.checkpoint.tensor_file import CHUNK_BYTES, LEAST_BYTES, CheckpointError, Entry
from minimax_jax.quantize import Weight, has_kernel_order
from pallas_kernels.layouts import mxfp8, nvfp4
from pallas_kernels.layouts.mxfp8 import MXFP8Tensor
from pallas_kernels.layouts.nvfp4 import NVFP4Tensor
from pallas_kernels.layouts.nvfp4_pages import to_pages
from sharding.apply import named_sharding
from sharding.axes import Axes
from sharding.rules import Rules

GateUp = Literal["contiguous", "interleaved"]
_OUTER = 2  # the part that has one number a matrix


@dataclass(frozen=True, kw_only=True)
class Part:
    """One array of a leaf: `number` among its form's parts, its shape and dtype in memory."""

    leaf: LeafPlan
    number: int
    shape: tuple[int, ...]
    dtype: np.dtype
    gate_up: GateUp

    def read_into(self, buffer: np.ndarray, bounds: Bounds) -> int:
        """Fills a buffer with what lies within `bounds`; the bytes read. CheckpointError for a
        scale that is NaN.
        """
        if self.number == _OUTER:
            return self._read_outer(buffer, bounds)
        *outer, (top, _), (left, _) = [(0, 1), *bounds][-max(2, len(bounds)) :]
        first = outer[0][0] if outer else 0
        read = 0
        for e, matrix in enumerate(buffer.reshape(-1, *buffer.shape[-2:]), start=first):
            entry, row, step = self._place(e)
            out = matrix.view(entry.dtype) if self._is_exponent(entry) else matrix
            read += entry.read_into(out, first=row + step * top, step=step, left=left)
            self._refuse_nan(entry, matrix)
        return read

    def chunk_bytes(self, buffer: np.ndarray) -> int:
        """Bytes of the buffer in which values wait for a cast or for being picked apart."""
        if self.number == _OUTER:
            return 0
        entry, _, step = self._place(0)
        out = buffer.view(entry.dtype) if self._is_exponent(entry) else buffer
        rows = out.shape[-2] if out.ndim > 1 else 1
        width = entry.shape[-1] if entry.shape else 1
        all_rows = rows * step * width * entry.dtype.itemsize
        return 0 if entry.fills(out, step) else min(CHUNK_BYTES, all_rows)

    def _place(self, e: int) -> tuple[Entry, int, int]:
        """Of the e-th matrix: its tensor, its first row there, and how far apart its rows are."""
        layout, entry = self.leaf.place.layout, self.leaf.tensors[0].parts[self.number]
        if layout == "per expert":
            return self.leaf.tensors[e].parts[self.number], 0, 1
        rows = self.shape[-2] if len(self.shape) > 1 else 1
        if layout == "whole":
            return entry, e * rows, 1
        half = int(layout == "up half")
        if self.gate_up == "contiguous":
            return entry, (2 * e + half) * rows, 1
        return entry, 2 * e * rows + half, 2

    def _read_outer(self, buffer: np.ndarray, bounds: Bounds) -> int:
        """Of each matrix its one number."""
        entries = [stored.parts[self.number] for stored in self.leaf.tensors]
        for entry in entries:
            self._refuse_nan(entry, entry.read())
        values = np.concatenate([entry.read().reshape(entry.size) for entry in entries])
        cut = tuple(slice(*bound) for bound in bounds)
        buffer[...] = values.reshape(self.shape)[cut]
        return sum(entry.nbytes for entry in entries)

    def _is_exponent(self, entry: Entry) -> bool:
        return entry.dtype.itemsize == 1 and self.dtype == np.uint8

    def _refuse_nan(self, entry: Entry, found: np.ndarray) -> None:
        """What is found may be a slice; the sentence names the place in the tensor."""
        if self._complaint(found) is not None:
            sentence = self._complaint(entry.read(), f"{entry} ")
            assert sentence is not None, entry
            raise CheckpointError(entry.file.parent, [sentence])

    def _complaint(self, scales: np.ndarray, name: str = "") -> str | None:
        form = self.leaf.form
        try:
            if form == "mxfp8" and self.number == 1:
                mxfp8.refuse_nan_scales(scales.view(np.uint8), name)
            elif form == "nvfp4" and self.number == 1:
                nvfp4.refuse_nan_scales(scales, name=name)
            elif form == "nvfp4" and self.number == _OUTER:
                nvfp4.refuse_nan_scales(np.zeros(0, np.uint8), scales, name)
        except ValueError as error:
            return str(error)
        return None


def parts(leaf: LeafPlan, plain: DTypeLike, gate_up: GateUp = "contiguous") -> list[Part]:
    """The parts of a leaf in order; plain values get the dtype `plain`."""
    *rows, width = leaf.shape
    if leaf.form == "plain":
        kinds = [(leaf.shape, plain)]
    elif leaf.form == "mxfp8":
        kinds = [(leaf.shape, "float8_e4m3fn"), ((*rows, width // mxfp8.GROUP), "uint8")]
    else:
        scales = (*rows, width // nvfp4.GROUP)
        codes = ((*rows, width // 2), "uint8")
        kinds = [codes, (scales, "float8_e4m3fn"), (leaf.shape[:-2], "float32")]
    return [
        Part(leaf=leaf, number=i, shape=tuple(shape), dtype=np.dtype(dtype), gate_up=gate_up)
        for i, (shape, dtype) in enumerate(kinds)
    ]


def host_weight(leaf: LeafPlan) -> Weight:
    """A leaf in numpy arrays; plain values keep the file's dtype."""
    arrays = []
    for part in parts(leaf, leaf.tensors[0].parts[0].dtype):
        arrays.append(np.empty(part.shape, part.dtype))
        part.read_into(arrays[-1], tuple((0, size) for size in part.shape))
    return assembled(leaf, arrays)


def assembled(leaf: LeafPlan, arrays: Sequence[Any]) -> Weight:
    """The weight that a leaf's parts make up."""
    if leaf.form == "plain":
        return arrays[0]
    if leaf.form == "mxfp8":
        return MXFP8Tensor(*arrays)
    return NVFP4Tensor(*arrays, divides=leaf.divides)


@dataclass(kw_only=True)
class Loader:
    """Reads what this process keeps of leaves through one host buffer at a time, and counts what it
    reads and holds.
    """

    mesh: Mesh | None
    rules: Rules
    gate_up: GateUp = "contiguous"
    peak: int = field(default=0)
    largest: int = field(default=0)
    read_bytes: int = field(default=0)

    def leaf(self, leaf: LeafPlan, axes: Axes, plain: DTypeLike) -> Weight:
        """The leaf on its devices, in the order of bytes that their kernels read; plain values get
        the dtype `plain`.
        """
        arrays = [self._part(part, axes) for part in parts(leaf, plain, self.gate_up)]
        weight = assembled(leaf, arrays)
        return self._in_pages(weight, axes) if has_kernel_order(leaf.path, weight) else weight

    def _in_pages(self, weight: NVFP4Tensor, axes: Axes) -> Weight:
        """The weight as pages; as it is where a shard would cut one."""
        pages = jax.eval_shape(to_pages, weight)
        whole = (*axes, None, None)
        try:
            shardings = jax.tree.map(lambda part: self.sharding(part.shape, whole), pages)
        except ValueError:
            return weight
        return jax.block_until_ready(jax.jit(to_pages, out_shardings=shardings)(weight))

    def _part(self, part: Part, axes: Axes) -> jax.Array:
        sharding = self.sharding(part.shape, axes)
        if sharding is None:
            whole = tuple((0, size) for size in part.shape)
            return jax.block_until_ready(jax.device_put(self._read(part, whole)))
        narrow = -(-LEAST_BYTES // part.leaf.tensors[0].parts[part.number].dtype.itemsize)
        shards = []
        for reading in readings(sharding, part.shape, narrow):
            buffer = self._read(part, reading.bounds)
            # By shard: nothing of a leaf passes through a device that does not keep it (F180).
            for device, cut in reading.kept:
                shards.append(jax.block_until_ready(jax.device_put(buffer[cut], device)))
        return jax.make_array_from_single_device_arrays(part.shape, sharding, shards)

    def _read(self, part: Part, bounds: Bounds) -> np.ndarray:
        buffer = np.empty([end - first for first, end in bounds], part.dtype)
        self.largest = max(self.largest, buffer.nbytes)
        self.peak = max(self.peak, buffer.nbytes + part.chunk_bytes(buffer))
        self.read_bytes += part.read_into(buffer, bounds)
        return buffer

    def sharding(self, shape: Sequence[int], axes: Axes) -> NamedSharding | None:
        """None without a mesh; a part with fewer dimensions has the first axes of its leaf."""
        if self.mesh is None:
            return None
        return named_sharding(self.mesh, tuple(axes)[: len(shape)], self.rules, shape)
