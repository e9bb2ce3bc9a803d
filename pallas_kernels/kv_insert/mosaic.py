"""kv_insert on Hopper: norm, rotation, quantisation and the write into pages by one kernel.

Grid: one warpgroup a token. Its vectors (K keys, K values, the index key) go round its four warps;
a lane has four neighbouring elements of 128. A key's mean square and a group's largest magnitude
are shuffles; the partner of a rotation is another lane's element. Bytes go straight to the page:
64 of codes and 8 of scales a vector (NVFP4), which one warp writes as whole sectors.

Memory: 256 bytes read and 72 written a vector. The pool is an operand that is also the result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, UInt8

from pallas_kernels import lanes
from pallas_kernels.dispatch import refuse_device
from pallas_kernels.kv_insert.reference import KeyTransform, Rows, Slots
from pallas_kernels.lanes import REF, SCALAR, Real, Word, word
from pallas_kernels.layouts import e2m1
from pallas_kernels.layouts.pool import LINE, Component, PoolLayout

WIDTH, PART = 128, 4  # elements of a vector, of a lane
FORMATS = ("nvfp4", "fp8", "bf16")
_ROTATED = (4, 8, 16, 32, 64)  # pairs: the partner is a power of two of lanes away
_SIXTH = 0.16666667163372040  # float32(1/6), as the format says


def refuse(
    pool: Array,
    layout: PoolLayout,
    line: Array | int,
    rows: Rows,
    slots: Slots,
    transform: KeyTransform,
) -> str | None:
    """A sentence for what this kernel does not do."""
    if reason := refuse_device():
        return reason
    parts = [(layout.kv, rows.k), (layout.kv, rows.v)]
    if rows.index_k is not None:
        parts.append((layout.index, rows.index_k))
    for component, values in parts:
        if component.format not in FORMATS:
            return f"pages are {component.format}, not one of {', '.join(FORMATS)}"
        if component.width != WIDTH:
            return f"vectors of {component.width} elements, not {WIDTH}"
        if values.dtype != jnp.bfloat16:
            return f"rows are {values.dtype}, not bfloat16"
    if transform.cos.shape[-1] not in _ROTATED:
        return f"{transform.cos.shape[-1]} pairs are rotated, not one of {_ROTATED}"
    return None


def kv_insert(
    pool: UInt8[Array, "P lines 128"],
    layout: PoolLayout,
    line: Array | int,
    rows: Rows,
    slots: Slots,
    transform: KeyTransform,
) -> UInt8[Array, "P lines 128"]:
    """See the package."""
    values = [rows.k, rows.v] + ([] if rows.index_k is None else [rows.index_k])
    norms = [transform.k_norm, *([] if transform.index_norm is None else [transform.index_norm])]
    kernel: Any = pl.kernel(
        lanes.named("kv_insert", _program, layout, transform.eps, len(norms)),
        out_type=(),
        mesh=plgpu.Mesh(grid=rows.k.shape[:1], grid_names=("token",)),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    places = (x.astype(jnp.int32) for x in (slots.block_ids, slots.places))
    angles = (x.astype(jnp.float32) for x in (transform.cos, transform.sin))
    in_place = jax.new_ref(pool)  # the kernel's operand and result are one buffer
    # Every array as it is: what would be stacked first costs a launch of its own in every layer.
    line = jnp.asarray(line, jnp.int32).reshape(1)
    kernel(in_place, line, *places, *angles, *norms, *values)
    return jax.freeze(in_place)


@dataclass(frozen=True, kw_only=True)
class _Vector:
    """One vector of a token: where it comes from, what it is, where its head begins."""

    source: int  # of keys, values, index keys
    head: int
    component: Component
    line: int  # of its component, from the layer's first
    norm: int | None  # which weights; None for values, which stay as they are


def _vectors(layout: PoolLayout, sources: int) -> list[_Vector]:
    kv = layout.kv
    found = [
        _Vector(source=i, head=head, component=kv, line=i * kv.lines, norm=None if i else 0)
        for i in (0, 1)
        for head in range(kv.heads)
    ]
    if sources == 3:
        index = _Vector(source=2, head=0, component=layout.index, line=2 * kv.lines, norm=1)
        found.append(index)
    return found


def _program(layout, eps, num_norms, pool, line, blocks, places, cos, sin, *arrays):
    """All vectors of one token; `arrays` are norms, then values."""
    token = lax.axis_index("token")
    block, place, first = blocks[token], places[token], line[0]
    sources, pairs = len(arrays) - num_norms, cos.shape[1]

    @pl.when((block >= 0) & (block < pool.shape[0]))
    def _():
        @lanes.code(*[REF] * (3 + len(arrays)), *[SCALAR] * 3)
        def insert(_, row, cos, sin, *rest):
            token, place, first = (lanes.scalar(x) for x in rest[len(arrays) :])
            angle = _Angles(lanes.address(cos), lanes.address(sin), pairs, token)
            for i, vector in enumerate(_vectors(layout, sources)):
                n = num_norms + vector.source
                at = (token * arrays[n].shape[1] + vector.head) * (2 * WIDTH)
                source = lanes.address(rest[n], at + lanes.lane() * (2 * PART))
                to = lanes.address(row, (first + vector.line) * LINE)

                def one(vector=vector, source=source, to=to):
                    x = _load(source)
                    if vector.norm is not None:
                        weight = _weights(rest[vector.norm], arrays[vector.norm].dtype)
                        x = _stored(angle.rotate(_normed(x, weight, eps)))
                    _WRITE[vector.component.format](to, vector.component, vector.head, place, x)

                lanes.when(lanes.warp().equals(i % 4), one)

        insert(pool.at[block], cos, sin, *arrays, token, place, first)


@dataclass(frozen=True)
class _Angles:
    """cos [T, r] and sin [T, r] of a token; dimensions i and i + r turn together."""

    cos: Any
    sin: Any
    pairs: int  # r
    token: Word

    def rotate(self, x: list[Real]) -> list[Real]:
        """a cos - b sin and b cos + a sin of the lanes that hold the first 2 r dimensions."""
        distance = self.pairs // PART  # in lanes
        offset = (self.token * self.pairs + ((lanes.lane() * PART) & (self.pairs - 1))) << 2
        cos, sin = (lanes.load_reals(x, offset, PART) for x in (self.cos, self.sin))
        first, turned = lanes.lane().below(distance), lanes.lane().below(2 * distance)
        rotated = []
        for one, c, s in zip(x, cos, sin, strict=True):
            other = lanes.shuffle_xor(one, distance) * s
            mine = one * c
            both = lanes.select(first, mine - other, mine + other)
            rotated.append(lanes.select(turned, both, one))
        return rotated


def _load(source: Any) -> list[Real]:
    return [x for one in lanes.load_words(source, 0, 2) for x in lanes.reals_of_pair(one, False)]


def _stored(x: list[Real]) -> list[Real]:
    """Rounded to bfloat16, the type of the rows, as the reference returns its keys."""
    pairs = [lanes.bf16_of_reals(x[i], x[i + 1]) for i in (0, 2)]
    return [one for pair in pairs for one in lanes.reals_of_pair(pair, False)]


def _weights(norm: Any, dtype: Any) -> list[Real]:
    """This lane's four weights of a norm, which are 16 or 32 bits wide."""
    if dtype == jnp.float32:
        return lanes.load_reals(lanes.address(norm), lanes.lane() << 4, PART)
    words = lanes.load_words(lanes.address(norm), lanes.lane() << 3, 2)
    return [x for one in words for x in lanes.reals_of_pair(one, dtype == jnp.float16)]


def _normed(x: list[Real], weight: list[Real], eps: float) -> list[Real]:
    """x / rms(x) * (1 + w), the rms over the warp."""
    square = x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3]
    for distance in (1, 2, 4, 8, 16):
        square = square + lanes.shuffle_xor(square, distance)
    scale = lanes.rsqrt(square * lanes.real(1 / WIDTH) + lanes.real(eps))
    return [one * scale * (lanes.real(1.0) + w) for one, w in zip(x, weight, strict=True)]


def _write_nvfp4(to: Any, component: Component, head: int, place: Word, x: list[Real]) -> None:
    """16 bits of codes a lane, a scale every fourth lane (see `layouts.nvfp4`)."""
    largest = lanes.maximum(
        lanes.maximum(lanes.absolute(x[0]), lanes.absolute(x[1])),
        lanes.maximum(lanes.absolute(x[2]), lanes.absolute(x[3])),
    )
    for distance in (1, 2):
        largest = lanes.maximum(largest, lanes.shuffle_xor(largest, distance))
    scale = lanes.e4m3_of_reals(largest * lanes.real(_SIXTH), lanes.real(0.0))
    step, _ = lanes.reals_of_pair(lanes.half2_of_e4m3(scale), True)
    codes = word(0)
    for i, one in enumerate(x):
        codes = codes | (_code(one, step) << (4 * i))
    codes = lanes.select((scale & 0xFF).equals(0), word(0), codes)
    row = place + head * component.tokens
    lanes.store_bits(to, row * component.code_bytes + lanes.lane() * 2, codes, 16)
    at = row * component.scale_bytes + (lanes.lane() >> 2) + component.code_lines * LINE
    lanes.when((lanes.lane() & 3).equals(0), partial(lanes.store_bits, to, at, scale, 8))


def _code(x: Real, step: Real) -> Word:
    """The E2M1 code of x / step: the halfway points below |x|, a tie to the even code."""
    size, code = lanes.absolute(x), (lanes.bits_of_real(x) >> 28) & 8
    for k, tie in enumerate(e2m1.TIES):
        bound = step * lanes.real(tie)
        above = lanes.negate(bound.above(size)) if k % 2 else size.above(bound)
        code = code + lanes.select(above, word(1), word(0))
    return code


def _write_fp8(to: Any, component: Component, head: int, place: Word, x: list[Real]) -> None:
    low, high = lanes.e4m3_of_reals(x[0], x[1]), lanes.e4m3_of_reals(x[2], x[3])
    row = place + head * component.tokens
    lanes.store_words(to, row * component.code_bytes + lanes.lane() * 4, [low | (high << 16)])


def _write_bf16(to: Any, component: Component, head: int, place: Word, x: list[Real]) -> None:
    words = [lanes.bf16_of_reals(x[i], x[i + 1]) for i in (0, 2)]
    row = place + head * component.tokens
    lanes.store_words(to, row * component.code_bytes + lanes.lane() * 8, words)


_WRITE: dict[str, Callable[[Any, Component, int, Word, list[Real]], None]] = {
    "nvfp4": _write_nvfp4,
    "fp8": _write_fp8,
    "bf16": _write_bf16,
}
