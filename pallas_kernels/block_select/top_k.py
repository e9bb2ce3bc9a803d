"""The C best blocks of a row of scores, in two passes without a sort.

Grid: one warpgroup for each query and head. A lane walks every 128th block and keeps its best. The
C-th best of these 128 is a bound that at least C blocks reach, and that few others do: only the C
lanes above it can have any. A second pass, from the cache, collects those blocks, and each of them
counts the ones before it: its place among the chosen. Two blocks are never equal: the higher score
comes first, then the lower id.

Memory: 4 bytes a visible block, read twice (once from the L1), 4 C bytes written. Blocks from
`newest` - `local_blocks` + 1 on and before `init_blocks` come first; those after `newest` never.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import lanes
from pallas_kernels.block_select.schedule import items_of_sequence
from pallas_kernels.lanes import REF, SCALAR, Real, Word, word

THREADS = 128
MAX_TOP_K = 64
_UNROLL = 8  # loads in flight
_FORCED = 0xFFFFFFFF  # the order of a forced block; 0 is that of no block
_LARGEST = 3.4028234663852886e38
_ENTRY_BYTES = 8
_Entry = tuple[Word, Word]  # order of a block, complement of its id: the greater pair is better


def top_blocks(
    scores: Float[Array, "items N P4"],
    positions: Int[Array, "B T"],
    *,
    heads: int,
    block_size: int,
    top_k: int,
    init_blocks: int,
    local_blocks: int,
) -> Int[Array, "B T K C"]:
    """Ids of each row's best blocks, best first, -1 in unused places; scores as `score` writes."""
    batch, queries = positions.shape
    entries = top_k * -(-scores.shape[2] // THREADS)
    kernel = plgpu.kernel(
        partial(_program, block_size, init_blocks, local_blocks),
        out_type=jax.ShapeDtypeStruct((batch, queries, heads, top_k), jnp.int32),
        grid=(batch * queries * heads,),
        grid_names=("row",),
        scratch_types=[
            plgpu.SMEM((2 * THREADS,), jnp.int32),
            plgpu.SMEM((2 * entries + 8,), jnp.int32),
            plgpu.SMEM((4,), jnp.int32),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(scores, positions)


def _program(block_size, init_blocks, local_blocks, scores, positions, ids, best, found, shared):
    """One row: its offset in the scores, its newest block, then the choice."""
    _, num_rows, width = scores.shape
    _, queries, heads, top_k = ids.shape
    row = lax.axis_index("row")
    token, head = row // heads, lax.rem(row, heads)
    sequence, query = token // queries, lax.rem(token, queries)
    newest = lax.shift_right_arithmetic(positions[sequence, query], block_size.bit_length() - 1)
    in_sequence = query * heads + head
    item = sequence * items_of_sequence(queries * heads) + in_sequence // num_rows
    start = (item * num_rows + lax.rem(in_sequence, num_rows)) * width

    @lanes.code(REF, REF, REF, REF, REF, SCALAR, SCALAR, SCALAR)
    def choose(_, scores, ids, best, found, shared, start, newest, row):
        line = _Line(
            pointer=lanes.address(scores, lanes.scalar(start) << 2),
            width=width,
            newest=lanes.scalar(newest),
            init_blocks=init_blocks,
            local_blocks=local_blocks,
        )
        best, found, shared = (lanes.address(x) for x in (best, found, shared))
        bound = _bound(line, top_k, best, shared)
        count = _collect(line, bound, found, shared)
        _place(found, count, lanes.address(ids, lanes.scalar(row) * (4 * top_k)), top_k)

    choose(scores, ids, best, found, shared, start, newest, row)


@dataclass(frozen=True, kw_only=True)
class _Line:
    """A row of scores: where it begins, how far it may be read, its newest visible block."""

    pointer: Any
    width: int
    newest: Word
    init_blocks: int
    local_blocks: int

    def entries(self, first: Word) -> list[_Entry]:
        """Entries of the blocks first, first + 128, ...; all their loads are in flight at once."""
        blocks = [first + i * THREADS for i in range(min(_UNROLL, -(-self.width // THREADS)))]
        scores = []
        for block in blocks:
            inside = lanes.select(block.below(self.width), block, word(self.width - 1))
            scores += lanes.load_reals(self.pointer, inside << 2, 1)
        return [self._entry(block, score) for block, score in zip(blocks, scores, strict=True)]

    def visit(self, body: Callable[..., list[Word]], carry: list[Word]) -> list[Word]:
        """`body(entry, *carry)` for this lane's visible blocks, by rising id, and some after."""

        def some(first, *carry):
            for entry in self.entries(first):
                carry = body(entry, *carry)
            return carry

        return lanes.repeat(lanes.thread(), self.newest + 1, THREADS * _UNROLL, some, carry)

    def _entry(self, block: Word, score: Real) -> _Entry:
        forced = (self.newest + -self.local_blocks).below(block)
        if self.init_blocks:
            forced = lanes.either(forced, block.below(self.init_blocks))
        order = lanes.select(forced, word(_FORCED), _order(score))
        order = lanes.select(self.newest.below(block), word(0), order)
        return order, block ^ -1


def _order(score: Real) -> Word:
    """An unsigned integer that rises with the score and is not 0: -0.0 equals 0.0, NaN is the
    lowest score, infinities are the largest finite ones.
    """
    score = lanes.minimum(lanes.maximum(score, lanes.real(-_LARGEST)), lanes.real(_LARGEST))
    bits = lanes.bits_of_real(score + lanes.real(0.0))
    return bits ^ lanes.select(bits.below(0), word(0xFFFFFFFF), word(1 << 31))


def _before(a: _Entry, b: _Entry) -> Any:
    """Whether a is the better one: an i1."""
    return lanes.either(a[0].above(b[0]), lanes.both(a[0].equals(b[0]), a[1].above(b[1])))


def _count_before(entry: _Entry, entries: Any, first: Word | int, limit: Word | int) -> Word:
    """How many of the four entries from `first` on, below `limit`, are better than this one."""
    count = word(0)
    for i in (0, 2):
        words = lanes.load_words(entries, (word(first) + i) * _ENTRY_BYTES, 4)
        for j in (0, 1):
            counts = _before((words[2 * j], words[2 * j + 1]), entry)
            counts = lanes.both(counts, (word(first) + (i + j)).below(limit))
            count = count + lanes.select(counts, word(1), word(0))
    return count


def _bound(line: _Line, top_k: int, best: Any, shared: Any) -> _Entry:
    """The C-th best of the lanes' best entries; leaves the counter behind it at zero."""

    def better(entry, order, code):
        is_better = entry[0].above(order)  # of equal ones the first, which has the lower id
        return [
            lanes.select(is_better, new, old) for new, old in zip(entry, (order, code), strict=True)
        ]

    order, code = line.visit(better, [word(0), lanes.thread() ^ -1])
    mine = order, code
    lanes.store_words(best, lanes.thread() * _ENTRY_BYTES, mine)
    lanes.when(lanes.thread().equals(0), lambda: lanes.store_words(shared, 8, [word(0)]))
    lanes.sync_warpgroup()
    place = word(0)
    for first in range(0, THREADS, 4):
        place = place + _count_before(mine, best, first, THREADS)
    lanes.when(place.equals(top_k - 1), lambda: lanes.store_words(shared, 0, mine))
    lanes.sync_warpgroup()
    order, code = lanes.load_words(shared, 0, 2)
    return order, code


def _collect(line: _Line, bound: _Entry, found: Any, shared: Any) -> Word:
    """Writes the visible entries that are not worse than the bound, in any order; their number."""

    def keep(entry):
        at = lanes.take_ticket(lanes.address_after(shared, 8))
        lanes.store_words(found, at * _ENTRY_BYTES, entry)

    def collect(entry):
        worse = lanes.either(_before(bound, entry), entry[0].equals(0))
        lanes.when(lanes.negate(worse), lambda: keep(entry))
        return []

    line.visit(collect, [])
    lanes.sync_warpgroup()
    return lanes.load_words(shared, 8, 1)[0]


def _place(found: Any, count: Word, ids: Any, top_k: int) -> None:
    """Writes each collected id to its place, and -1 behind the last."""

    def place(index):
        order, code = lanes.load_words(found, index * _ENTRY_BYTES, 2)
        [place] = lanes.repeat(
            0, count, 4, lambda i, n: [n + _count_before((order, code), found, i, count)], [word(0)]
        )
        write = partial(lanes.store_words, ids, place << 2, [code ^ -1])
        lanes.when(place.below(top_k), write)
        return []

    lanes.repeat(lanes.thread(), count, THREADS, place)
    thread = lanes.thread()
    unused = lanes.both(thread.below(top_k), lanes.negate(thread.below(count)))
    lanes.when(unused, lambda: lanes.store_words(ids, thread << 2, [word(-1)]))
