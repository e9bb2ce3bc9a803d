"""A leaf out of its files, by parts (values; codes and exponents; codes, scales and outer scale),
onto its devices.

The one place that undoes a file's layout (`names.Layout`): experts are stacked one by one into the
caller's buffer, and fused gate and up rows are taken apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from minimax_jax.checkpoint.plan import LeafPlan
from minimax_jax.checkpoint.tensor_file import CHUNK_BYTES, CheckpointError, Entry
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

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the buffer in which values wait for a cast or for being picked apart."""
        entry = self.leaf.tensors[0].parts[self.number]
        fused = self.leaf.place.layout in ("gate half", "up half")
        direct = entry.dtype == self.dtype or self._is_exponent(entry)
        if direct and not (fused and self.gate_up == "interleaved"):
            return 0
        return min(CHUNK_BYTES, entry.nbytes)

    def read_into(self, buffer: np.ndarray) -> None:
        """Fills a buffer of `shape`. CheckpointError for a scale that is NaN."""
        layout = self.leaf.place.layout
        entries = [stored.parts[self.number] for stored in self.leaf.tensors]
        if layout == "per expert":
            for e, entry in enumerate(entries):
                self._read(entry, buffer[e : e + 1])
        else:
            self._read(entries[0], buffer)

    def _read(self, entry: Entry, out: np.ndarray) -> None:
        if self.number == _OUTER:
            out[...] = entry.read().reshape(out.shape)
        elif self.leaf.place.layout in ("gate half", "up half"):
            self._read_half(entry, out)
        else:
            entry.read_into(out.view(entry.dtype) if self._is_exponent(entry) else out)
        self._refuse_nan(entry, out)

    def _read_half(self, entry: Entry, out: np.ndarray) -> None:
        *_, rows, _ = self.shape
        matrices = out.reshape(-1, *out.shape[-2:])
        up = int(self.leaf.place.layout == "up half")
        for e, matrix in enumerate(matrices):
            first, step = (up * rows, 1) if self.gate_up == "contiguous" else (up, 2)
            view = matrix.view(entry.dtype) if self._is_exponent(entry) else matrix
            entry.read_into(view, first=2 * e * rows + first, step=step)

    def _is_exponent(self, entry: Entry) -> bool:
        return entry.dtype.itemsize == 1 and self.dtype == np.uint8

    def _refuse_nan(self, entry: Entry, out: np.ndarray) -> None:
        form = self.leaf.form
        out = out.reshape(entry.shape) if out.size == entry.size else out
        try:
            if form == "mxfp8" and self.number == 1:
                mxfp8.refuse_nan_scales(out, f"{entry} ")
            elif form == "nvfp4" and self.number == 1:
                nvfp4.refuse_nan_scales(out, name=f"{entry} ")
            elif form == "nvfp4" and self.number == _OUTER:
                nvfp4.refuse_nan_scales(np.zeros(0, np.uint8), out, f"{entry} ")
        except ValueError as error:
            raise CheckpointError(entry.file.parent, [str(error)]) from error


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
        part.read_into(arrays[-1])
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
    """Reads leaves through one host buffer at a time, and counts what it holds."""

    mesh: Mesh | None
    rules: Rules
    gate_up: GateUp = "contiguous"
    peak: int = field(default=0)
    largest: int = field(default=0)

    def leaf(self, leaf: LeafPlan, axes: Axes, plain: DTypeLike) -> Weight:
        """The leaf on its devices, in the order of bytes that their kernels read; plain values get
        the dtype `plain`.
        """
        arrays = [self._part(leaf, part, axes) for part in parts(leaf, plain, self.gate_up)]
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

    def _part(self, leaf: LeafPlan, part: Part, axes: Axes) -> jax.Array:
        buffer = np.empty(part.shape, part.dtype)
        self.largest = max(self.largest, buffer.nbytes)
        self.peak = max(self.peak, buffer.nbytes + part.chunk_bytes)
        part.read_into(buffer)
        sharding = self.sharding(part.shape, axes)
        if sharding is None:
            return jax.block_until_ready(jax.device_put(buffer))
        # By shard: nothing of a leaf passes through a device that does not keep it (F180).
        array = jax.make_array_from_callback(part.shape, sharding, lambda index: buffer[index])
        return jax.block_until_ready(array)

    def sharding(self, shape: Sequence[int], axes: Axes) -> NamedSharding | None:
        """None without a mesh; a part with fewer dimensions has the first axes of its leaf."""
        if self.mesh is None:
            return None
        return named_sharding(self.mesh, tuple(axes)[: len(shape)], self.rules, shape)
