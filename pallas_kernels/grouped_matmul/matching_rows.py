"""Rows of x sorted by expert and laid out as the other operand of decoded pages: of 128 columns,
32 t + 2 j + e lies at 8 j + 2 t + e (`page_lanes`), in slabs of 64.

Grid: programs of one warpgroup, each takes every G-th place. A lane reads 16 bytes of a row; four
lanes, which have the same pairs j of the four t, swap words so that each stores 16 bytes.

Memory: each row of x once a choice (from the L2 after the first), the same written. Places that are
empty are not written.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import lanes
from pallas_kernels.lanes import REF, SCALAR, Word

SLAB = 64  # columns of one operand: half of a page's
WIDTHS = 256  # x has a multiple of these columns, or the lanes of a warp would part
_MOST_PROGRAMS = 132 * 12  # of an H200, all resident
_THREADS = 128
_PIECE = 8  # elements that a lane moves at once
_EIGHTHS = SLAB // _PIECE  # pieces of a row of a slab
_FLIGHT = 8  # pieces that it loads before it stores the first


def matching_rows(x: Float[Array, "T D"], token: Int[Array, "S"]) -> Float[Array, "slabs S 64"]:
    """x[token] with its columns permuted, [D / 64, S, 64]; places of token -1 are undefined."""
    assert x.dtype.itemsize == 2 and x.shape[1] % WIDTHS == 0
    (S,), D = token.shape, x.shape[1]
    programs = min(S, _MOST_PROGRAMS)
    kernel = plgpu.kernel(
        _program,
        out_type=jax.ShapeDtypeStruct((D // SLAB, S, SLAB), x.dtype),
        grid=(programs,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(x, token)


def _program(x: Any, token: Any, out: Any) -> None:
    pieces, places = x.shape[1] // _PIECE, token.shape[0]
    programs = min(places, _MOST_PROGRAMS)

    @lanes.code(REF, REF, REF, SCALAR)
    def move(_, x, token, out, program):
        def move_row(place):
            (row,) = lanes.load_words(lanes.address(token), place << 2, 1)
            lanes.when(
                lanes.word(-1).below(row),
                lambda: _move_row(
                    lanes.address(x, row * (16 * pieces)), lanes.address(out), place, pieces, places
                ),
            )
            return []

        lanes.repeat(lanes.scalar(program), places, programs, move_row)

    move(x, token, out, lax.axis_index("program"))


def _move_row(source: Any, to: Any, place: Word, pieces: int, places: int) -> None:
    for first in range(0, pieces, _THREADS * _FLIGHT):
        some = []
        for start in range(first, min(pieces, first + _THREADS * _FLIGHT), _THREADS):
            piece = lanes.thread() + start
            inside = lanes.select(piece.below(pieces), piece, lanes.word(pieces - 1))
            some.append((piece, lanes.load_words(source, inside << 4, 4)))
        for piece, words in some:
            slab, sixteen = _target(piece)
            at = ((slab * places + place) << 7) + (sixteen << 4)
            swapped = _across(words)

            def store(at=at, words=swapped):
                lanes.store_words(to, at, words)

            lanes.when(piece.below(pieces), store)


def load_rows(rows: int, columns: int, teams: int, transforms: Any) -> Callable:
    """The same of places `first` .. `first + rows` into shared memory [columns / 64, rows, 64],
    swizzled, by all threads of `teams` warpgroups together; rows of empty places are any.
    """

    @lanes.code(REF, REF, plgpu.RefType(transforms), SCALAR, SCALAR)
    def load(_, x, token, to, first, team):
        tokens = lanes.address(token, lanes.scalar(first) << 2)

        def source_of(row: Word) -> Word:
            (token,) = lanes.load_words(tokens, row << 2, 1)
            return lanes.select(token.below(0), lanes.word(0), token)

        addresses = lanes.address(x), lanes.address(to)
        _load_rows(*addresses, (rows, columns // _PIECE), lanes.scalar(team), teams, source_of)

    return load


def load_first_rows(rows: int, columns: int, teams: int, transforms: Any) -> Callable:
    """All rows of x into the first ones of [columns / 64, 8, 64], alike."""

    @lanes.code(REF, plgpu.RefType(transforms), SCALAR)
    def load(_, x, to, team):
        addresses = lanes.address(x), lanes.address(to)
        _load_rows(
            *addresses, (rows, columns // _PIECE), lanes.scalar(team), teams, lambda row: row
        )

    return load


def load_sorted_rows(rows: int, shape: tuple[int, ...], teams: int, transforms: Any) -> Callable:
    """Places `first` .. `first + rows` of what this file makes, of this shape [slabs, S, 64], into
    the rows from `row` on of the slabs from `slab` on of [..., 8, 64], swizzled, by all threads
    together.
    """
    slabs, places, _ = shape
    pieces, threads = rows * slabs * _EIGHTHS, teams * _THREADS

    @lanes.code(REF, plgpu.RefType(transforms), *[SCALAR] * 4)
    def load(_, x, to, first, slab, row, team):
        first_row = lanes.scalar(row)
        source = lanes.address(x, lanes.scalar(first) << 7)
        target = lanes.address(to, (lanes.scalar(slab) << 10) + (first_row << 7))
        thread = lanes.thread() + lanes.scalar(team) * _THREADS
        starts = range(0, pieces, threads)
        for begin in range(0, len(starts), _FLIGHT):
            some = []
            for start in starts[begin : begin + _FLIGHT]:
                piece = _at_most(thread + start, pieces - 1)
                eighth, line = piece & 7, piece >> 3
                one = line // rows
                n = line + one * -rows
                words = lanes.load_words(source, ((one * places + n) << 7) + (eighth << 4), 4)
                at = (one << 10) + (n << 7) + ((eighth ^ (first_row + n)) << 4)
                some.append((at, words))
            for at, words in some:
                lanes.store_words(target, at, words)

    return load


def _load_rows(
    source: Any, target: Any, shape: tuple[int, int], team: Word, teams: int, source_of: Callable
) -> None:
    rows, pieces = shape
    thread = lanes.thread() + team * _THREADS
    starts = range(0, rows * pieces, teams * _THREADS)
    for begin in range(0, len(starts), _FLIGHT):
        some = []
        for start in starts[begin : begin + _FLIGHT]:
            inside = _at_most(thread + start, rows * pieces - 1)
            row = inside // pieces
            piece = inside + row * -pieces
            at = (source_of(row) * pieces + piece) << 4
            some.append((start, row, piece, lanes.load_words(source, at, 4)))
        for start, row, piece, words in some:
            slab, sixteen = _target(piece)
            at = (slab << 10) + (row << 7) + ((sixteen ^ (row & 7)) << 4)
            store = functools.partial(lanes.store_words, target, at, _across(words))
            lanes.when((thread + start).below(rows * pieces), store)


def _at_most(x: Word, bound: int) -> Word:
    return lanes.select(x.below(bound), x, lanes.word(bound))


def _target(piece: Word) -> tuple[Word, Word]:
    """Slab and 16 bytes of it that a lane stores: pairs j = 4 (piece % 4) + t of every t."""
    return ((piece >> 4) << 1) + ((piece >> 1) & 1), ((piece & 1) << 2) + _t()


def _t() -> Word:
    return (lanes.lane() >> 2) & 3


def _across(words: list[Word]) -> list[Word]:
    """Word i of the lane t becomes word t of the lane i, of four lanes 4 apart."""
    t, words = _t(), list(words)
    for bit in (1, 2):
        is_upper = (t & bit).equals(bit)
        for low in (0, 1, 2, 3):
            if low & bit:
                continue
            high = low | bit
            sent = lanes.select(is_upper, words[low], words[high])
            got = lanes.bits_of_real(lanes.shuffle_xor(lanes.real_of_bits(sent), 4 * bit))
            words[low], words[high] = (
                lanes.select(is_upper, got, words[low]),
                lanes.select(is_upper, words[high], got),
            )
    return words
