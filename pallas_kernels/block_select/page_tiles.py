"""Products of query rows with one page of NVFP4 keys in each warp; the maximum over the tokens.

A lane (g, t) = (lane / 4, lane % 4) reads 16 bytes of token row 8 i + g, the 32 dimensions from
32 t, and the two scales of these: decoded, they are the A operand of a tile of 16 tokens. The
contraction's order is free, so the queries are permuted, not the keys. Both ways of multiplying
give the maximum over the tiles as `query_rows` packs it, warp w's of its page.

* `Few`, N <= 16: each warp by itself, mma.m16n8k16, queries in registers.
* `Many`: the four warps together, wgmma, queries in shared memory, some tiles in flight.

`best` is of whole pages; the functions below serve pieces of them as well.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes, nvfp4_lanes
from pallas_kernels.block_select.query_rows import fold, pack, packed_type, place_rows, unpack
from pallas_kernels.lanes import REF, SCALAR, Word

CODE_BYTES, PAGE_BYTES = 8192, 9216
ROW_CODES, ROW_SCALES = 512, 64  # bytes of a row of eight tokens
TILES = 8  # of 16 tokens
_WGMMA = plgpu.Layout.WGMMA
HALF_OPERAND = plgpu.ShapeDtypeStruct((64, 64), jnp.float16, layout=_WGMMA)
_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_FLIGHT = {64: 2, 128: 1}  # tiles of `Many` at once, by N: as many as registers allow


class Few:
    """Queries [N / 8, 4, 32 lanes, 4 words]: for word w of a lane's codes, its four half2 pairs."""

    @staticmethod
    def scratch(num_rows: int, teams: int) -> Any:
        """Where the queries of some programs lie."""
        return plgpu.SMEM((teams * num_rows // 8, 4, 32, 8), jnp.float16)

    @staticmethod
    def of_team(queries: Any, num_rows: int, team: Any) -> Any:
        """Those of one of them."""
        return queries.at[pl.ds(team * (num_rows // 8), num_rows // 8)]

    @staticmethod
    def load(q: Any, queries: Any, num_rows: int, start: Any, end: Any) -> None:
        """Brings an item's rows there."""

        @lanes.code(REF, REF, SCALAR, SCALAR)
        def load(_, q_ref, queries, start, end):
            bounds = lanes.scalar(start), lanes.scalar(end)
            place_rows(q_ref, q.dtype, num_rows, bounds, Few.place(lanes.address(queries)))

        load(q, queries, start, end)

    @staticmethod
    def place(to: Any) -> Callable[[Word, Word, list[Word]], None]:
        """Stores a chunk of a row in the memory of that address, as `place_rows` asks."""

        def place(row, chunk, words):
            lane = ((row & 7) << 2) + (chunk >> 2)
            at = ((row >> 3) << 11) + ((chunk & 3) << 9) + (lane << 4)
            lanes.store_words(to, at, words)

        return place

    @staticmethod
    def words(rows: Any, num_rows: int) -> list[list[list[Word]]]:
        """The four pairs of each word w of this lane's query, per 8 rows."""
        lane16 = lanes.lane() << 4
        return [
            [lanes.load_words(rows, lane16 + (2048 * n + 512 * w), 4) for w in range(4)]
            for n in range(num_rows // 8)
        ]

    @staticmethod
    def best(pages: Any, queries: Any, num_rows: int) -> Any:
        """The maximum over eight tiles."""

        @lanes.code(REF, REF, returns=packed_type(num_rows))
        def best(_, pages, queries):
            page = lanes.address(pages, lanes.warp() * PAGE_BYTES)
            b, found = Few.words(lanes.address(queries), num_rows), None
            for tile in range(TILES):
                low, high = _decoded(page, tile)
                found = fold(multiply(low, high, b), found)
            assert found is not None
            return pack(found)

        return best(pages, queries)


class Many:
    """Queries [2, N, 64], swizzled: two B operands. Of chunk 4 t + w, pair i is elements
    32 (w % 2) + 8 i + 2 t and the next one of operand w / 2.
    """

    @staticmethod
    def scratch(num_rows: int, teams: int) -> Any:
        """Where the queries of some programs lie."""
        return plgpu.SMEM((teams * 2, num_rows, 64), jnp.float16, transforms=_SWIZZLED)

    @staticmethod
    def of_team(queries: Any, num_rows: int, team: Any) -> Any:
        """Those of one of them."""
        return queries.at[pl.ds(team * 2, 2)]

    @staticmethod
    def load(q: Any, queries: Any, num_rows: int, start: Any, end: Any) -> None:
        """Brings an item's rows there."""

        @lanes.code(REF, plgpu.RefType(_SWIZZLED), SCALAR, SCALAR)
        def load(_, q_ref, queries, start, end):
            to = lanes.address(queries)

            def place(row, chunk, words):
                t, w = chunk >> 2, chunk & 3
                at = (w >> 1) * (num_rows * 128) + (row << 7) + (t << 2)
                for i, one in enumerate(words):
                    piece = (((w & 1) << 2) + i) ^ (row & 7)
                    lanes.store_words(to, at + (piece << 4), [one])

            bounds = lanes.scalar(start), lanes.scalar(end)
            place_rows(q_ref, q.dtype, num_rows, bounds, place)

        load(q, queries, start, end)

    @staticmethod
    def best(pages: Any, queries: Any, num_rows: int) -> Any:
        """The maximum over eight tiles."""
        flight = _FLIGHT[num_rows]
        found: list[Any] = []
        for first in range(0, TILES, flight):

            def products(*sums, first=first):
                for tile, total in enumerate(sums, first):
                    for half, a in enumerate(_operands(tile, pages)):
                        plgpu.wgmma(total, a, queries.at[half].transpose((1, 0)))
                return [total[...] for total in sums]

            sums = plgpu.ACC((64, num_rows), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
            for part in pl.run_scoped(products, *[sums] * flight):
                found = [fold_array(num_rows, part, *found)]
        return found[0]


def load_row(codes: Any, row: int, rows: int) -> list[Word]:
    """Codes (four words) and scales of this lane in a row of eight tokens, of as many as lie there
    before their scales.
    """
    words = lanes.load_words(codes, (lanes.lane() << 4) + ROW_CODES * row, 4)
    at = (lanes.lane() << 1) + (ROW_CODES * rows + ROW_SCALES * row)
    return [*words, lanes.load_bits(codes, at, 16)]


def decode_row(words: list[Word]) -> list[list[Word]]:
    """half2 words [4 words][4 pairs] of what `load_row` gives."""
    *codes, scales = words
    steps = nvfp4_lanes.scale_pairs(scales)
    pairs = [nvfp4_lanes.code_pairs(one) for one in codes]
    return [[lanes.multiply_half2(x, steps[w // 2]) for x in pairs[w]] for w in range(4)]


def multiply(
    low: list[list[Word]], high: list[list[Word]], b: list[list[list[Word]]]
) -> list[list[Any]]:
    """One warp's sums of a tile of these two rows, per 8 query rows."""
    sums = [[lanes.real(0.0)] * 4 for _ in b]
    for w in range(4):
        for i in (0, 2):
            a = [low[w][i], high[w][i], low[w][i + 1], high[w][i + 1]]
            sums = [
                lanes.multiply_tile(one, a, query[w][i : i + 2])
                for one, query in zip(sums, b, strict=True)
            ]
    return sums


def operands_of(low: list[list[Word]], high: list[list[Word]]) -> tuple[Any, Any]:
    """Two A operands (`HALF_OPERAND`) of a tile of these two rows of each warp: codes of words 0, 1
    and of 2, 3.
    """
    columns = [[low[w][i], high[w][i]] for w in range(4) for i in range(4)]
    return lanes.half_accumulator(columns[:8]), lanes.half_accumulator(columns[8:])


def fold_array(num_rows: int, sums: Any, *found: Any) -> Any:
    """The maximum of a tile and of what was found before, if anything was."""

    @lanes.code(_WGMMA, *[_WGMMA] * len(found), returns=packed_type(num_rows))
    def folded(_, sums, *found):
        before = unpack(found[0], num_rows) if found else None
        return pack(fold(lanes.tiles_of(sums), before))

    return folded(sums, *found)


def sync_warps() -> None:
    """Waits for the four warps of a program, in array code."""

    @lanes.code()
    def sync(_):
        lanes.sync_warpgroup()

    sync()


def _decoded(page: Any, tile: int) -> list[list[list[Word]]]:
    """half2 words of a tile of a page [rows g, g + 8][4 words][4 pairs]."""
    return [decode_row(load_row(page, 2 * tile + i, 2 * TILES)) for i in (0, 1)]


def _operands(tile: int, pages: Any) -> tuple[Any, Any]:
    """A tile of each warp's page as A operands."""

    @lanes.code(REF, returns=(HALF_OPERAND, HALF_OPERAND))
    def decode(_, pages):
        return operands_of(*_decoded(lanes.address(pages, lanes.warp() * PAGE_BYTES), tile))

    return decode(pages)
