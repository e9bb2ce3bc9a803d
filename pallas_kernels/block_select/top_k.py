"""The C best blocks of a row of scores, in two passes without a sort.

Grid: a team of one warp (rows of up to `SHORT` blocks) or of one warpgroup a row. A lane walks its
share of the blocks and keeps its best. The C-th best of these is a bound that at least C blocks
reach, and that few others do: only the C lanes above it can have any. A second pass, from the
cache, collects those blocks, and each of them counts the ones before it: its place among the
chosen. Two blocks are never equal: the higher score comes first, then the lower id.

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

MAX_TOP_K = 32  # no more than a team has lanes
SHORT = 1024
_THREADS, _WARP = 128, 32
_PART = 4  # neighbouring scores that a lane loads at once
_IN_FLIGHT = 8  # such loads
_COMPARED = 16  # entries at once
_FORCED = 0xFFFFFFFF  # the order of a forced block; 0 is that of no block
_LARGEST = 3.4028234663852886e38
_ENTRY_BYTES = 8
_SHARED_BYTES = 16  # of a team: the bound, then the number of entries found
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
    """Ids of each row's best blocks, best first, -1 in unused places; scores as `score` has."""
    batch, queries = positions.shape
    width = scores.shape[2]
    team = _WARP if width <= SHORT else _THREADS
    found = _found_entries(width, team, top_k)
    kernel = plgpu.kernel(
        lanes.named("top_blocks", _program, team, block_size, init_blocks, local_blocks),
        out_type=jax.ShapeDtypeStruct((batch, queries, heads, top_k), jnp.int32),
        grid=(-(-batch * queries * heads * team // _THREADS),),
        grid_names=("program",),
        scratch_types=[
            plgpu.SMEM((_THREADS * 2,), jnp.int32),
            plgpu.SMEM((_THREADS // team * found * 2,), jnp.int32),
            plgpu.SMEM((_THREADS // team * _SHARED_BYTES // 4,), jnp.int32),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(scores, positions)


def _found_entries(width: int, team: int, top_k: int) -> int:
    """Room for what reaches the bound, all of C lanes at most, and is read past the end."""
    rounds = -(-width // (team * _PART))
    return top_k * rounds * _PART + 4


def _program(team, block_size, init_blocks, local_blocks, scores, positions, ids, *scratch):
    """One row of each team: its offset in the scores, its newest block, then the choice."""
    _, num_rows, width = scores.shape
    batch, queries, heads, top_k = ids.shape
    rows_of_sequence = queries * heads
    padding = items_of_sequence(rows_of_sequence) * num_rows - rows_of_sequence

    @lanes.code(*[REF] * 6, SCALAR)
    def choose(_, scores, positions, ids, best, found, shared, program):
        number = lanes.thread() // team
        row = lanes.scalar(program) * (_THREADS // team) + number
        start = row + (row // rows_of_sequence) * padding

        def one():
            [position] = lanes.load_words(lanes.address(positions), (row // heads) << 2, 1)
            newest = lanes.select(position.below(0), word(-1), position // block_size)
            line = _Line(
                pointer=lanes.address(scores, (start * width) << 2),
                width=width,
                newest=newest,
                init_blocks=init_blocks,
                local_blocks=local_blocks,
                team=team,
                top_k=top_k,
            )
            entries = _found_entries(width, team, top_k)
            room = _Room(
                best=lanes.address(best, number * (team * _ENTRY_BYTES)),
                found=lanes.address(found, number * (entries * _ENTRY_BYTES)),
                bound=lanes.address(shared, number * _SHARED_BYTES),
                count=lanes.address(shared, number * _SHARED_BYTES + _ENTRY_BYTES),
            )
            bound = _bound(line, room)
            count = _collect(line, bound, room)
            _place(line, count, room, lanes.address(ids, row * (4 * top_k)))

        lanes.when(row.below(batch * rows_of_sequence), one)

    choose(scores, positions, ids, *scratch, lax.axis_index("program"))


@dataclass(frozen=True)
class _Room:
    """A team's shared memory."""

    best: Any
    found: Any
    bound: Any
    count: Any


@dataclass(frozen=True, kw_only=True)
class _Line:
    """A row of scores: where it begins, how far it may be read, its newest visible block."""

    pointer: Any
    width: int
    newest: Word
    init_blocks: int
    local_blocks: int
    team: int
    top_k: int

    @property
    def member(self) -> Word:
        """This lane's number in the team."""
        return lanes.thread() & (self.team - 1)

    def sync(self) -> None:
        """Waits for the team."""
        (lanes.sync_warp if self.team == _WARP else lanes.sync_warpgroup)()

    def visit(
        self, body: Callable[..., list[Word]], carry: list[Word], in_flight: int
    ) -> list[Word]:
        """`body(entry, *carry)` for this lane's visible blocks, by rising id, and some after."""
        stride = self.team * _PART
        loads = min(in_flight, -(-self.width // stride))

        def some(first, *carry):
            for entry in self._entries([first + i * stride for i in range(loads)]):
                carry = body(entry, *carry)
            return carry

        return lanes.repeat(self.member * _PART, self.newest + 1, stride * loads, some, carry)

    def _entries(self, firsts: list[Word]) -> list[_Entry]:
        """Entries of the blocks from each of `firsts` on; all their loads are in flight at once."""
        scores = []
        for first in firsts:
            inside = lanes.select(first.below(self.width), first, word(0))
            scores.append(lanes.load_reals(self.pointer, inside << 2, _PART))
        return [
            self._entry(first + i, score)
            for first, part in zip(firsts, scores, strict=True)
            for i, score in enumerate(part)
        ]

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
    return lanes.above_pair(a, b)


def _count_before(entry: _Entry, entries: Any, first: Word | int, limit: Word | None) -> Word:
    """How many of the four entries from `first` on, below `limit`, are better than this one."""
    count = word(0)
    for i in (0, 2):
        words = lanes.load_words(entries, (word(first) + i) * _ENTRY_BYTES, 4)
        for j in (0, 1):
            counts = _before((words[2 * j], words[2 * j + 1]), entry)
            if limit is not None:
                counts = lanes.both(counts, (word(first) + (i + j)).below(limit))
            count = count + lanes.select(counts, word(1), word(0))
    return count


def _bound(line: _Line, room: _Room) -> _Entry:
    """The C-th best of the lanes' best entries; leaves the counter at zero."""

    def better(entry, order, code):
        is_better = entry[0].above(order)  # of equal ones the first, which has the lower id
        pairs = zip(entry, (order, code), strict=True)
        return [lanes.select(is_better, new, old) for new, old in pairs]

    order, code = line.visit(better, [word(0), line.member ^ -1], _IN_FLIGHT)
    mine = order, code
    lanes.store_words(room.best, line.member * _ENTRY_BYTES, mine)
    lanes.when(line.member.equals(0), lambda: lanes.store_words(room.count, 0, [word(0)]))
    line.sync()

    def more(first, place):
        for i in range(0, _COMPARED, 4):
            place = place + _count_before(mine, room.best, first + i, None)
        return [place]

    [place] = lanes.repeat(0, line.team, _COMPARED, more, [word(0)])
    lanes.when(place.equals(line.top_k - 1), lambda: lanes.store_words(room.bound, 0, mine))
    line.sync()
    order, code = lanes.load_words(room.bound, 0, 2)
    return order, code


def _collect(line: _Line, bound: _Entry, room: _Room) -> Word:
    """Writes the visible entries that are not worse than the bound, in any order; their number."""

    def keep(entry):
        at = lanes.take_ticket(room.count)
        lanes.store_words(room.found, at * _ENTRY_BYTES, entry)

    def collect(entry):
        worse = lanes.either(_before(bound, entry), entry[0].equals(0))
        lanes.when(lanes.negate(worse), partial(keep, entry))
        return []

    line.visit(collect, [], 1)  # from the L1: a short loop, since code is fetched, too
    line.sync()
    return lanes.load_words(room.count, 0, 1)[0]


def _place(line: _Line, count: Word, room: _Room, ids: Any) -> None:
    """Writes each collected id to its place, and -1 behind the last."""

    def place(index):
        order, code = lanes.load_words(room.found, index * _ENTRY_BYTES, 2)

        def more(first, before):
            return [before + _count_before((order, code), room.found, first, count)]

        [before] = lanes.repeat(0, count, 4, more, [word(0)])
        write = partial(lanes.store_words, ids, before << 2, [code ^ -1])
        lanes.when(before.below(line.top_k), write)
        return []

    lanes.repeat(line.member, count, line.team, place)
    unused = lanes.both(line.member.below(line.top_k), lanes.negate(line.member.below(count)))
    lanes.when(unused, lambda: lanes.store_words(ids, line.member << 2, [word(-1)]))
