"""Where code of lanes begins, who the lane is, conditions, branches, loops and barriers."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from pallas_kernels.lanes.registers import Real, Word, asm, asm_of_warp, asm_void, i32, word

REF = plgpu.RefType()  # arguments of `code`: a reference without transforms,
SCALAR = plgpu.Layout.WG_SPLAT(())  # and an int32 scalar


def named(name: str, program: Callable[..., None], *first: Any, **options: Any) -> Any:
    """A kernel's program with its first arguments, under the name that profilers show."""
    body = functools.partial(program, *first, **options)
    body.__name__ = name  # pyright: ignore[reportAttributeAccessIssue]
    return body


def code(*arguments: Any, returns: Any = None) -> Callable[[Callable], Callable[..., Any]]:
    """Makes a function of (context, *arguments) part of a kernel: what it calls here is emitted.

    `arguments` are `REF`, `SCALAR` or layouts of arrays, `returns` shapes with layouts.
    """
    return plgpu.inline_mgpu(arg_types=arguments, return_type=returns)


def scalar(array: Any) -> Word:
    """The one register of an int32 scalar that came in as `Layout.WG_SPLAT(())`."""
    return Word(array.registers.flat[0])


def splat(x: Word) -> Any:
    """A register that all lanes agree on, as the int32 scalar `Layout.WG_SPLAT(())`."""
    return fa.FragmentedArray.splat(x.value, (), is_signed=True)


def thread() -> Word:
    """0..127 inside the warpgroup."""
    return Word(utils.thread_idx()) & 127


def lane() -> Word:
    """0..31 inside the warp."""
    return thread() & 31


def warp() -> Word:
    """0..3 inside the warpgroup, known to be uniform."""
    return Word(utils.warp_idx()) & 3


def both(a: Any, b: Any) -> Any:
    """Two conditions (i1) at once."""
    return arith.andi(a, b)


def either(a: Any, b: Any) -> Any:
    """One of two conditions (i1), or both."""
    return arith.ori(a, b)


def above_pair(a: Sequence[Word], b: Sequence[Word]) -> Any:
    """Whether (a[0], a[1]) is greater than (b[0], b[1]), the first word counting first: an i1."""
    wide = ir.IntegerType.get_signless(64)
    shift = arith.constant(wide, 32)

    def joined(pair: Sequence[Word]) -> Any:
        high, low = (arith.extui(wide, x.value) for x in pair)
        return arith.ori(arith.shli(high, shift), low)

    return arith.cmpi(arith.CmpIPredicate.ugt, joined(a), joined(b))


def negate(a: Any) -> Any:
    """The opposite of a condition (i1)."""
    return arith.xori(a, arith.constant(ir.IntegerType.get_signless(1), 1))


def any_lane(conditions: Sequence[Any]) -> Any:
    """Whether any of some conditions (i1) holds in any lane of the warp: an i1."""
    condition = functools.reduce(arith.ori, conditions)
    text = (
        "{ .reg .pred mine, any; setp.ne.b32 mine, $1, 0; "
        "vote.sync.any.pred any, mine, 0xffffffff; selp.b32 $0, 1, 0, any; }"
    )
    found = asm(i32(), [arith.extui(i32(), condition)], text, "=r,r")
    return arith.cmpi(arith.CmpIPredicate.ne, found, word(0).value)


def first_lane(condition: Any) -> Word:
    """The lowest lane of the warp in which a condition (i1) holds; 32 where none does."""
    text = (
        "{ .reg .pred mine; .reg .b32 set; setp.ne.b32 mine, $1, 0; "
        "vote.sync.ballot.b32 set, mine, 0xffffffff; brev.b32 set, set; clz.b32 $0, set; }"
    )
    return Word(asm(i32(), [arith.extui(i32(), condition)], text, "=r,r"))


def lanes_where(condition: Any) -> Word:
    """A bit for each lane of the warp, set where a condition (i1) holds."""
    text = (
        "{ .reg .pred mine; setp.ne.b32 mine, $1, 0; vote.sync.ballot.b32 $0, mine, 0xffffffff; }"
    )
    return Word(asm_of_warp([arith.extui(i32(), condition)], text, "=r,r"))


def lanes_alike(x: Word) -> Word:
    """A bit for each lane of the warp, set where its word is this lane's."""
    return Word(asm_of_warp([x.value], "match.any.sync.b32 $0, $1, 0xffffffff;", "=r,r"))


def lanes_before() -> Word:
    """A bit for each lane of the warp, set for those of a lower number."""
    return Word(asm(i32(), [], "mov.u32 $0, %lanemask_lt;", "=r"))


def branch(condition: Any, changed: Callable[[], list[Real]], same: list[Real]) -> list[Real]:
    """`changed()` where the condition holds, else `same`: a real branch."""
    one = scf.IfOp(condition, [x.value.type for x in same], has_else=True)
    with ir.InsertionPoint(one.then_block):
        scf.yield_([x.value for x in changed()])
    assert one.else_block is not None
    with ir.InsertionPoint(one.else_block):
        scf.yield_([x.value for x in same])
    return [Real(x) for x in one.results]


def when(condition: Any, do: Callable[[], None]) -> None:
    """Runs `do` in the lanes where the condition holds."""
    branch = scf.IfOp(condition, [])
    with ir.InsertionPoint(branch.then_block):
        do()
        scf.yield_([])


def in_one_warp(number: Any, condition: Any, do: Callable[[], None]) -> None:
    """Runs `do`, code of Pallas that starts copies, in this warp of the warpgroup if the condition
    holds; the others go on. Each copy is one arrival, as one of the whole warpgroup is.
    """

    @plgpu.warp_map
    def _(warp):
        pl.when((warp == number) & condition)(do)


def repeat(
    start: Word | int,
    stop: Word | int,
    step: int,
    body: Callable[..., Sequence[Word]],
    carry: Sequence[Word] = (),
) -> list[Word]:
    """A loop: `body(i, *carry)` gives the next carry; each lane may have its own bounds."""
    first, last, by = (word(x).value for x in (start, stop, step))
    loop = scf.ForOp(first, last, by, [one.value for one in carry])
    with ir.InsertionPoint(loop.body):
        after = body(Word(loop.induction_variable), *map(Word, loop.inner_iter_args))
        scf.yield_([one.value for one in after])
    return [Word(result) for result in loop.results]


def shuffle_xor(x: Real, distance: int) -> Real:
    """The value of the lane whose number differs by these bits."""
    return Real(utils.shfl_bfly(x.value, distance))


def sync_warpgroup() -> None:
    """Waits for the 128 threads of this warpgroup."""
    utils.warpgroup_barrier()


def sync_block() -> None:
    """Waits for all threads of the CTA; shared memory written before is visible after."""
    asm_void("bar.sync 0;")


def sync_warp() -> None:
    """Waits for the 32 lanes of this warp; shared memory written before is visible after."""
    asm_void("bar.warp.sync 0xffffffff;")


def sync_cluster() -> None:
    """Waits for every thread of the cluster; shared memory written before is visible after."""
    asm_void("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;")
