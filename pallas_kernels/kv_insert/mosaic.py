"""kv_insert on Hopper: norm, rotation, quantisation and the write into pages by one kernel, which
norms and rotates queries too.

Eight lanes have a vector of 128 elements: a lane two pieces of 8 neighbours which a rotation turns
against each other (`_Angles`), so that only a mean square and a group's largest magnitude need
shuffles. Grid: programs of `_VECTORS` vectors, first those of K keys, then of values, of index keys
and of queries, token by token, so that all lanes of a program do the same.

Memory: 256 bytes read and 72 written a vector (NVFP4), or 256 of a query. The pool is an operand
that is also the result.
"""

from collections.abc import Callable, Sequence
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
from pallas_kernels.kv_insert.reference import KeyTransform, Query, Rows, Slots
from pallas_kernels.lanes import REF, SCALAR, Real, Word, word
from pallas_kernels.layouts import e2m1
from pallas_kernels.layouts.pool import LINE, Component, PoolLayout

WIDTH = 128  # elements of a vector
FORMATS = ("nvfp4", "fp8", "bf16")
_ROTATED = (16, 32, 64)  # pairs: whole groups of 16 for two lanes
_LANES, _PIECE = 8, 8  # of a vector, elements of a piece
_VECTORS = 16  # of a program
_ROW_BYTES = 2 * WIDTH
_SIXTH = 0.16666667163372040  # float32(1/6), as the format says


def refuse(
    pool: Array,
    layout: PoolLayout,
    line: Array | int,
    rows: Rows,
    slots: Slots,
    transform: KeyTransform,
    queries: Sequence[Query] = (),
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
    for heads, _ in queries:
        if heads.shape[-1] != WIDTH or heads.dtype != jnp.bfloat16:
            return f"queries are {heads.shape[-1]} of {heads.dtype}, not {WIDTH} of bfloat16"
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
    queries: Sequence[Query] = (),
) -> tuple[UInt8[Array, "P lines 128"], list[Array]]:
    """See `with_queries` of the package."""
    values = [rows.k, rows.v] + ([] if rows.index_k is None else [rows.index_k])
    norms = [transform.k_norm, *([] if transform.index_norm is None else [transform.index_norm])]
    weights, heads = [one.weight for one in queries], [one.heads for one in queries]
    kernel: Any = pl.kernel(
        lanes.named("kv_insert", _program, layout, transform.eps, len(norms), len(heads)),
        out_type=tuple(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in heads),
        mesh=plgpu.Mesh(grid=(sum(map(_programs, values + heads)),), grid_names=("program",)),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    places = (x.astype(jnp.int32) for x in (slots.block_ids, slots.places))
    angles = (x.astype(jnp.float32) for x in (transform.cos, transform.sin))
    in_place = jax.new_ref(pool)  # the kernel's operand and result are one buffer
    # Every array as it is: what would be stacked first costs a launch of its own in every layer.
    line = jnp.asarray(line, jnp.int32).reshape(1)
    turned = kernel(in_place, line, *places, *angles, *norms, *values, *weights, *heads)
    return jax.freeze(in_place), list(turned)


def _programs(values: Any) -> int:
    """How many programs the vectors of [T, heads, 128] need."""
    return -(-values.shape[0] * values.shape[1] // _VECTORS)


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """The vectors of one source: keys, values or index keys."""

    component: Component
    line: int  # of its component, from the layer's first
    norm: int | None  # which weights; None for values, which stay as they are


def _kinds(layout: PoolLayout, sources: int) -> list[_Kind]:
    kv = layout.kv
    return [
        _Kind(component=kv, line=0, norm=0),
        _Kind(component=kv, line=kv.lines, norm=None),
        _Kind(component=layout.index, line=2 * kv.lines, norm=1),
    ][:sources]


def _program(layout, eps, num_norms, num_queries, pool, line, blocks, places, cos, sin, *arrays):
    """Vectors of a kind; `arrays` are norms and values, then queries' norms, heads and results."""
    program, rest = lax.axis_index("program"), len(arrays) - 3 * num_queries
    norms, sources, queries = arrays[:num_norms], arrays[num_norms:rest], arrays[rest:]
    first = 0

    def run(values, of_program):
        nonlocal first
        last = first + _programs(values)
        pl.when((program >= first) & (program < last))(partial(of_program, program - first))
        first = last

    for kind, values in zip(_kinds(layout, len(sources)), sources, strict=True):
        norm = () if kind.norm is None else (norms[kind.norm],)
        refs = pool, blocks, places, cos, sin, values, *norm
        run(values, partial(_insert, kind, eps, refs, line))
    for i in range(num_queries):
        weight, heads, out = queries[i::num_queries]
        run(heads, partial(_turn, eps, (cos, sin, heads, out, weight)))


def _insert(kind, eps, refs, line, program):
    """The `program`-th vectors of one kind."""
    pool, _, _, cos, _, values, *norm = refs
    tokens, heads, _ = values.shape
    pool_blocks, row_bytes, pairs = pool.shape[0], pool.shape[1] * LINE, cos.shape[1]

    @lanes.code(*[REF] * len(refs), *[SCALAR] * 2)
    def insert(_, pool, blocks, places, cos, sin, values, *rest):
        *weights, program, line = rest
        number, inside = _own_vector(program, tokens * heads)
        token = number // heads
        head = number + token * -heads
        x = _load(lanes.element(lanes.address(values), number, _ROW_BYTES), pairs)
        [block] = lanes.load_words(lanes.address(blocks), token << 2, 1)
        [place] = lanes.load_words(lanes.address(places), token << 2, 1)
        if weights:
            angle = _Angles(lanes.address(cos), lanes.address(sin), pairs, token)
            x = _normed(x, _weights(weights[0], norm[0].dtype, pairs), eps)
            x = _stored(angle.rotate(x))
        start = (lanes.scalar(line) + kind.line) * LINE
        row = place + head * kind.component.tokens
        inside = lanes.both(inside, lanes.both(word(-1).below(block), block.below(pool_blocks)))
        block = lanes.select(inside, block, word(0))
        to = lanes.at(lanes.element(lanes.address(pool), block, row_bytes), start)
        _WRITE[kind.component.format](to, kind.component, row, x, pairs, inside)

    insert(*refs, program, line[0])


def _turn(eps, refs, program):
    """The `program`-th vectors of queries, as they came but for norm and rotation."""
    cos, _, values, _, norm = refs
    (tokens, heads, _), pairs = values.shape, cos.shape[1]

    @lanes.code(*[REF] * len(refs), SCALAR)
    def turn(_, cos, sin, values, out, weight, program):
        number, inside = _own_vector(program, tokens * heads)
        x = _load(lanes.element(lanes.address(values), number, _ROW_BYTES), pairs)
        angle = _Angles(lanes.address(cos), lanes.address(sin), pairs, number // heads)
        x = angle.rotate(_normed(x, _weights(weight, norm.dtype, pairs), eps))
        to = lanes.element(lanes.address(out), number, _ROW_BYTES)
        _store_bf16(to, x, pairs, inside)

    turn(*refs, program)


def _own_vector(program: Any, count: int) -> tuple[Word, Any]:
    """Which of `count` vectors this lane has a part of, and whether there is such a one."""
    number = lanes.scalar(program) * _VECTORS + (lanes.thread() >> 3)
    inside = number.below(count)
    return lanes.select(inside, number, word(0)), inside


def _dimensions(pairs: int) -> list[Word]:
    """The first dimension of this lane's two pieces: they are `pairs` apart in a block of 2 `pairs`
    dimensions, of which the first block turns.
    """
    own, share = lanes.lane() & (_LANES - 1), pairs // _PIECE  # lanes of a block
    first = (own // share) * (2 * pairs) + (own & (share - 1)) * _PIECE
    return [first, first + pairs]


@dataclass(frozen=True)
class _Angles:
    """cos [T, r] and sin [T, r] of a token; dimensions i and i + r turn together."""

    cos: Any
    sin: Any
    pairs: int  # r
    token: Word

    def rotate(self, x: list[list[Real]]) -> list[list[Real]]:
        """a cos - b sin and b cos + a sin in the lanes that hold the first 2 r dimensions."""
        first, _ = _dimensions(self.pairs)
        turned = first.below(self.pairs)
        offset = lanes.select(turned, first, word(0)) + self.token * self.pairs
        cos, sin = (
            [c for at in (0, 16) for c in lanes.load_reals(lanes.at(one, at), offset << 2, 4)]
            for one in (self.cos, self.sin)
        )
        pieces: list[list[Real]] = [[], []]
        for a, b, c, s in zip(*x, cos, sin, strict=True):
            pieces[0].append(lanes.select(turned, a * c - b * s, a))
            pieces[1].append(lanes.select(turned, b * c + a * s, b))
        return pieces


def _load(source: Any, pairs: int) -> list[list[Real]]:
    """This lane's two pieces of a bfloat16 vector."""
    return [_reals(lanes.load_words(source, at << 1, 4)) for at in _dimensions(pairs)]


def _reals(words: list[Word], halves: bool = False) -> list[Real]:
    return [x for one in words for x in lanes.reals_of_pair(one, halves)]


def _stored(x: list[list[Real]]) -> list[list[Real]]:
    """Rounded to bfloat16, the type of the rows, as the reference returns its keys."""
    return [_reals(_bf16(piece)) for piece in x]


def _bf16(piece: list[Real]) -> list[Word]:
    return [lanes.bf16_of_reals(piece[i], piece[i + 1]) for i in range(0, _PIECE, 2)]


def _weights(norm: Any, dtype: Any, pairs: int) -> list[list[Real]]:
    """This lane's weights of a norm, which are 16 or 32 bits wide."""
    pointer, found = lanes.address(norm), []
    for at in _dimensions(pairs):
        if dtype == jnp.float32:
            found.append([x for i in (0, 4) for x in lanes.load_reals(pointer, (at + i) << 2, 4)])
        else:
            found.append(_reals(lanes.load_words(pointer, at << 1, 4), dtype == jnp.float16))
    return found


def _normed(x: list[list[Real]], weights: list[list[Real]], eps: float) -> list[list[Real]]:
    """x / rms(x) * (1 + w), the rms over eight lanes."""
    square = lanes.real(0.0)
    for one in (*x[0], *x[1]):
        square = square + one * one
    for distance in (1, 2, 4):
        square = square + lanes.shuffle_xor(square, distance)
    scale = lanes.rsqrt(square * lanes.real(1 / WIDTH) + lanes.real(eps))
    return [
        [one * scale * (lanes.real(1.0) + w) for one, w in zip(*piece, strict=True)]
        for piece in zip(x, weights, strict=True)
    ]


def _write_nvfp4(
    to: Any, component: Component, row: Word, x: list[list[Real]], pairs: int, inside: Any
) -> None:
    """A word of codes a piece, a scale every other lane (see `layouts.nvfp4`)."""
    even = (lanes.lane() & 1).equals(0)
    scale_line = component.code_lines * LINE
    for first, piece in zip(_dimensions(pairs), x, strict=True):
        largest = lanes.absolute(piece[0])
        for one in piece[1:]:
            largest = lanes.maximum(largest, lanes.absolute(one))
        largest = lanes.maximum(largest, lanes.shuffle_xor(largest, 1))
        scale = lanes.e4m3_of_reals(largest * lanes.real(_SIXTH), lanes.real(0.0))
        codes = _codes(piece, scale)
        at = row * component.code_bytes + (first >> 1)
        lanes.when(inside, partial(lanes.store_words, to, at, [codes]))
        at = row * component.scale_bytes + (first >> 4) + scale_line
        lanes.when(lanes.both(inside, even), partial(lanes.store_bits, to, at, scale, 8))


def _codes(piece: list[Real], scale: Word) -> Word:
    """The E2M1 codes of eight values over a step: three comparisons each with the halfway points
    below |x|, a tie to the even code. A step of zero has codes of zero.
    """
    step, _ = lanes.reals_of_pair(lanes.half2_of_e4m3(scale), True)
    bounds = [step * lanes.real(tie) for tie in e2m1.TIES]

    def reaches(x, k):
        return lanes.negate(k.above(x))

    codes = word(0)
    for i, one in enumerate(piece):
        size = lanes.absolute(one)
        upper = reaches(size, bounds[3])
        middle = reaches(size, lanes.select(upper, bounds[5], bounds[1]))
        low = lanes.select(upper, bounds[4], bounds[0])
        high = lanes.select(upper, bounds[6], bounds[2])
        last = size.above(lanes.select(middle, high, low))
        for bit, condition in ((4, upper), (2, middle), (1, last)):
            codes = codes | lanes.select(condition, word(bit << (4 * i)), word(0))
        sign = lanes.bits_of_real(one) & (1 << 31)
        codes = codes | (sign >> (28 - 4 * i))
    return lanes.select((scale & 0xFF).equals(0), word(0), codes)


def _write_fp8(
    to: Any, component: Component, row: Word, x: list[list[Real]], pairs: int, inside: Any
) -> None:
    for first, piece in zip(_dimensions(pairs), x, strict=True):
        halves = [lanes.e4m3_of_reals(piece[i], piece[i + 1]) for i in range(0, _PIECE, 2)]
        words = [halves[i] | (halves[i + 1] << 16) for i in (0, 2)]
        at = row * component.code_bytes + first
        lanes.when(inside, partial(lanes.store_words, to, at, words))


def _write_bf16(
    to: Any, component: Component, row: Word, x: list[list[Real]], pairs: int, inside: Any
) -> None:
    _store_bf16(lanes.at(to, row * component.code_bytes), x, pairs, inside)


def _store_bf16(to: Any, x: list[list[Real]], pairs: int, inside: Any) -> None:
    for first, piece in zip(_dimensions(pairs), x, strict=True):
        lanes.when(inside, partial(lanes.store_words, to, first << 1, _bf16(piece)))


_WRITE: dict[str, Callable[[Any, Component, Word, list[list[Real]], int, Any], None]] = {
    "nvfp4": _write_nvfp4,
    "fp8": _write_fp8,
    "bf16": _write_bf16,
}
