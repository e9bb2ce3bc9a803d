"""What one lane of a warp does inside a Mosaic GPU kernel: 32-bit words, loads and stores at byte
addresses, half2 arithmetic, tensor-core products of one warp.

Array code cannot say which bytes a lane owns; these few operations can. They are used in bodies
given to `code` under `LoweringSemantics.Lane`, where every call emits instructions of
the running lane.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf, vector

REF = plgpu.RefType()  # arguments of `code`: a reference without transforms,
SCALAR = plgpu.Layout.WG_SPLAT(())  # and an int32 scalar
_SIGN = 1 << 31


@dataclass(frozen=True)
class Word:
    """A 32-bit register: an integer, or two float16 (`half2`)."""

    value: Any  # ir.Value

    def __and__(self, other: "Word | int") -> "Word":
        return Word(arith.andi(self.value, word(other).value))

    def __or__(self, other: "Word | int") -> "Word":
        return Word(arith.ori(self.value, word(other).value))

    def __xor__(self, other: "Word | int") -> "Word":
        return Word(arith.xori(self.value, word(other).value))

    def __add__(self, other: "Word | int") -> "Word":
        return Word(arith.addi(self.value, word(other).value))

    def __mul__(self, other: "Word | int") -> "Word":
        return Word(arith.muli(self.value, word(other).value))

    def __floordiv__(self, by: int) -> "Word":
        """An unsigned integer divided by a constant."""
        return Word(arith.divui(self.value, word(by).value))

    def __lshift__(self, by: int) -> "Word":
        """Moves bits up by a constant; a negative one moves them down."""
        if by < 0:
            return self >> -by
        return Word(arith.shli(self.value, word(by).value)) if by else self

    def __rshift__(self, by: int) -> "Word":
        return Word(arith.shrui(self.value, word(by).value)) if by else self

    def below(self, bound: "Word | int") -> Any:
        """Whether this, as a signed integer, is less than `bound`: an i1."""
        return arith.cmpi(arith.CmpIPredicate.slt, self.value, word(bound).value)

    def above(self, bound: "Word | int") -> Any:
        """Whether this, as an unsigned integer, is greater than `bound`: an i1."""
        return arith.cmpi(arith.CmpIPredicate.ugt, self.value, word(bound).value)

    def equals(self, other: "Word | int") -> Any:
        """Whether all bits agree: an i1."""
        return arith.cmpi(arith.CmpIPredicate.eq, self.value, word(other).value)


@dataclass(frozen=True)
class Real:
    """A float32 register."""

    value: Any  # ir.Value

    def __add__(self, other: "Real") -> "Real":
        return Real(arith.addf(self.value, other.value))

    def __sub__(self, other: "Real") -> "Real":
        return Real(arith.subf(self.value, other.value))

    def __mul__(self, other: "Real") -> "Real":
        return Real(arith.mulf(self.value, other.value))

    def __truediv__(self, other: "Real") -> "Real":
        return Real(arith.divf(self.value, other.value))

    def above(self, other: "Real") -> Any:
        """Whether this is greater than `other`: an i1, false for NaN."""
        return arith.cmpf(arith.CmpFPredicate.OGT, self.value, other.value)

    def differs(self, other: "Real") -> Any:
        """Whether this is not `other`, or NaN: an i1."""
        return arith.cmpf(arith.CmpFPredicate.UNE, self.value, other.value)


def code(*arguments: Any, returns: Any = None) -> Callable[[Callable], Callable[..., Any]]:
    """Makes a function of (context, *arguments) part of a kernel: what it calls here is emitted.

    `arguments` are `REF`, `SCALAR` or layouts of arrays, `returns` shapes with layouts.
    """
    return plgpu.inline_mgpu(arg_types=arguments, return_type=returns)


def word(x: "Word | int") -> Word:
    """A constant, or the word itself."""
    if isinstance(x, Word):
        return x
    x &= 0xFFFFFFFF
    return Word(arith.constant(_i32(), x - 2 * _SIGN if x & _SIGN else x))


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


def address(ref: Any, offset: Word | int = 0) -> Any:
    """A pointer `offset` bytes into a reference, in its own address space."""
    return _advance(utils.memref_ptr(ref), offset)


def address_after(pointer: Any, offset: Word | int) -> Any:
    """A pointer `offset` bytes further."""
    return _advance(pointer, offset)


def at(pointer: Any, offset: Word | int) -> Any:
    """A pointer some bytes further on."""
    return _advance(pointer, offset)


def load_words(pointer: Any, offset: Word | int, count: int) -> list[Word]:
    """`count` (1, 2 or 4) consecutive words, as one load; the address is aligned alike."""
    at = _advance(pointer, offset)
    if count == 1:
        return [Word(llvm.load(_i32(), at))]
    loaded = llvm.load(ir.VectorType.get((count,), _i32()), at)
    return [Word(llvm.extractelement(loaded, word(i).value)) for i in range(count)]


def load_bits(pointer: Any, offset: Word | int, bits: int) -> Word:
    """8 or 16 bits, zero-extended."""
    loaded = llvm.load(ir.IntegerType.get_signless(bits), _advance(pointer, offset))
    return Word(arith.extui(_i32(), loaded))


def store_words(pointer: Any, offset: Word | int, words: Sequence[Word]) -> None:
    """1, 2 or 4 consecutive words, as one store."""
    at = _advance(pointer, offset)
    if len(words) == 1:
        llvm.store(words[0].value, at)
        return
    packed = vector.from_elements(
        ir.VectorType.get((len(words),), _i32()), [one.value for one in words]
    )
    llvm.store(packed, at)


def load_reals(pointer: Any, offset: Word | int, count: int) -> list[Real]:
    """`count` (1, 2 or 4) consecutive float32 values, as one load."""
    return [real_of_bits(x) for x in load_words(pointer, offset, count)]


def store_reals(pointer: Any, offset: Word | int, reals: Sequence[Real]) -> None:
    """1, 2 or 4 consecutive float32 values, as one store."""
    store_words(pointer, offset, [bits_of_real(x) for x in reals])


def store_bf16(pointer: Any, offset: Word | int, x: Real) -> None:
    """One value rounded to bfloat16."""
    llvm.store(arith.truncf(ir.BF16Type.get(), x.value), _advance(pointer, offset))


def store_bits(pointer: Any, offset: Word | int, x: Word, bits: int) -> None:
    """The low 8 or 16 bits."""
    narrow = arith.trunci(ir.IntegerType.get_signless(bits), x.value)
    llvm.store(narrow, _advance(pointer, offset))


def half2(x: Word) -> Any:
    """The word as vector<2xf16>."""
    return llvm.bitcast(ir.VectorType.get((2,), ir.F16Type.get()), x.value)


def multiply_half2(a: Word, b: Word) -> Word:
    """Two float16 products."""
    return Word(llvm.bitcast(_i32(), arith.mulf(half2(a), half2(b))))


def bit_select(mask: int, ones: Word, zeros: Word) -> Word:
    """The bits of `ones` where the mask has them, of `zeros` elsewhere: one instruction, which the
    compiler cannot take apart (it would, to distribute a later mask over its parts).
    """
    args = [word(mask).value, ones.value, zeros.value]
    return Word(_asm(_i32(), args, "lop3.b32 $0, $1, $2, $3, 0xCA;", "=r,r,r,r"))


def permute_bytes(a: Word, b: Word, selector: int) -> Word:
    """Four of the eight bytes of a (0..3) and b (4..7), the lowest nibble choosing the lowest."""
    args = [a.value, b.value, word(selector).value]
    return Word(_asm(_i32(), args, "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r"))


def half2_of_e4m3(x: Word) -> Word:
    """The float16 values of the two E4M3 bytes in the low half of x, exact; NaN stays NaN."""
    text = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; cvt.rn.f16x2.e4m3x2 $0, lo; }"
    return Word(_asm(_i32(), [x.value], text, "=r,r"))


def e4m3_of_reals(low: Real, high: Real) -> Word:
    """Two float32 values as E4M3 bytes: nearest, ties to even, saturating; NaN is 0x7F."""
    text = "{ .reg .b16 both; cvt.rn.satfinite.e4m3x2.f32 both, $1, $2; cvt.u32.u16 $0, both; }"
    return Word(_asm(_i32(), [high.value, low.value], text, "=r,f,f"))


def bf16_of_reals(low: Real, high: Real) -> Word:
    """Two float32 values rounded to bfloat16."""
    args = [high.value, low.value]
    return Word(_asm(_i32(), args, "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f"))


def half2_of_reals(low: Real, high: Real) -> Word:
    """Two float32 values rounded to float16."""
    args = [high.value, low.value]
    return Word(_asm(_i32(), args, "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f"))


def reals_of_pair(x: Word, halves: bool) -> list[Real]:
    """The two float16 (`halves`), or bfloat16, of a word, the low one first."""
    if halves:
        wide = arith.extf(ir.VectorType.get((2,), ir.F32Type.get()), half2(x))
        return [Real(one) for one in _pair(wide)]
    return [real_of_bits(x << 16), real_of_bits(x & 0xFFFF0000)]


def reals_of_half2(x: Word) -> list[Real]:
    """The two float16 values of a word."""
    wide = arith.extf(ir.VectorType.get((2,), ir.F32Type.get()), half2(x))
    return [Real(_element(wide, i)) for i in (0, 1)]


def real(x: float) -> Real:
    """A float32 constant."""
    return Real(arith.constant(ir.F32Type.get(), x))


def real_of_bits(x: Word) -> Real:
    """The float32 with these bits."""
    return Real(llvm.bitcast(ir.F32Type.get(), x.value))


def bits_of_real(x: Real) -> Word:
    """The bits of a float32."""
    return Word(llvm.bitcast(_i32(), x.value))


def maximum(a: Real, b: Real) -> Real:
    """The greater one; a NaN loses to every number."""
    return Real(arith.maxnumf(a.value, b.value))


def minimum(a: Real, b: Real) -> Real:
    """The smaller one; a NaN loses to every number."""
    return Real(arith.minnumf(a.value, b.value))


def absolute(x: Real) -> Real:
    """|x|."""
    return real_of_bits(bits_of_real(x) & 0x7FFFFFFF)


def rsqrt(x: Real) -> Real:
    """1 / sqrt(x), approximately (2^-22.9)."""
    return Real(_asm(ir.F32Type.get(), [x.value], "rsqrt.approx.f32 $0, $1;", "=f,f"))


def exp2(x: Real) -> Real:
    """2^x, approximately (2 units in the last place); 0 for -inf."""
    return Real(_asm(ir.F32Type.get(), [x.value], "ex2.approx.ftz.f32 $0, $1;", "=f,f"))


def log2(x: Real) -> Real:
    """The logarithm, approximately; -inf for 0."""
    return Real(_asm(ir.F32Type.get(), [x.value], "lg2.approx.ftz.f32 $0, $1;", "=f,f"))


def select(condition: Any, yes: Any, no: Any) -> Any:
    """One of two words, or of two reals, without a branch."""
    return type(yes)(arith.select(condition, yes.value, no.value))


def multiply_tile(sums: Sequence[Real], a: Sequence[Word], b: Sequence[Word]) -> list[Real]:
    """mma.m16n8k16: 4 sums of this lane plus the product of half2 fragments a [4] and b [2]."""
    f32 = ir.F32Type.get()
    result = ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>")
    text = (
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    args = [x.value for x in (*a, *b, *sums)]
    out = _asm(result, args, text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f")
    return [Real(llvm.extractvalue(f32, out, [i])) for i in range(4)]


def both(a: Any, b: Any) -> Any:
    """Two conditions (i1) at once."""
    return arith.andi(a, b)


def either(a: Any, b: Any) -> Any:
    """One of two conditions (i1), or both."""
    return arith.ori(a, b)


def shuffle_xor(x: Real, distance: int) -> Real:
    """The value of the lane whose number differs by these bits."""
    return Real(utils.shfl_bfly(x.value, distance))


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
    found = _asm(_i32(), [arith.extui(_i32(), condition)], text, "=r,r")
    return arith.cmpi(arith.CmpIPredicate.ne, found, word(0).value)


def first_lane(condition: Any) -> Word:
    """The lowest lane of the warp in which a condition (i1) holds; 32 where none does."""
    text = (
        "{ .reg .pred mine; .reg .b32 set; setp.ne.b32 mine, $1, 0; "
        "vote.sync.ballot.b32 set, mine, 0xffffffff; brev.b32 set, set; clz.b32 $0, set; }"
    )
    return Word(_asm(_i32(), [arith.extui(_i32(), condition)], text, "=r,r"))


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


def take_ticket(pointer: Any) -> Word:
    """Adds one to a word of shared memory, atomically among its readers; its value before."""
    one = word(1).value
    kind, order = llvm.AtomicBinOp.add, llvm.AtomicOrdering.monotonic
    return Word(llvm.atomicrmw(kind, pointer, one, order))


def sync_warpgroup() -> None:
    """Waits for the 128 threads of this warpgroup."""
    utils.warpgroup_barrier()


def sync_warp() -> None:
    """Waits for the 32 lanes of this warp; shared memory written before is visible after."""
    _asm_void("bar.warp.sync 0xffffffff;")


def sync_cluster() -> None:
    """Waits for every thread of the cluster; shared memory written before is visible after."""
    _asm_void("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;")


def in_cluster(pointer: Any, rank: Word | int) -> Any:
    """The address of the same shared memory in another CTA of the cluster."""
    return nvvm.mapa(llvm.PointerType.get(7), pointer, word(rank).value)


def tiles_of(array: Any) -> list[list[Real]]:
    """Per 8 columns of a float32 (64, n) array in `Layout.WGMMA`, this lane's 4 values: two
    neighbouring columns of row g = lane / 4, then of row g + 8, of the warp's 16 rows.
    """
    return [
        [Real(x) for half in (0, 1) for x in _pair(array.registers[0, i, 0, 0, half, 0, 0, 0, 0])]
        for i in range(array.registers.shape[1])
    ]


def array_of(tiles: Sequence[Sequence[Real]]) -> Any:
    """The inverse of `tiles_of`."""
    registers = np.empty((1, len(tiles), 1, 1, 2, 1, 1, 1, 1), dtype=object)
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    for i, values in enumerate(tiles):
        for half in (0, 1):
            both = [x.value for x in values[2 * half : 2 * half + 2]]
            registers[0, i, 0, 0, half, 0, 0, 0, 0] = vector.from_elements(pair, both)
    return fa.FragmentedArray(_registers=registers, _layout=fa.WGMMA_LAYOUT, _is_signed=None)


def half_accumulator(tiles: Sequence[Sequence[Word]]) -> Any:
    """The inverse of `half_fragments`."""
    registers = np.empty((1, len(tiles), 1, 1, 2, 1, 1, 1, 1), dtype=object)
    for i, words in enumerate(tiles):
        for half, one in enumerate(words):
            registers[0, i, 0, 0, half, 0, 0, 0, 0] = half2(one)
    return fa.FragmentedArray(_registers=registers, _layout=fa.WGMMA_LAYOUT, _is_signed=None)


def half_fragments(array: Any) -> list[list[Word]]:
    """Per 8 columns of a float16 (64, n) array in `Layout.WGMMA`, this lane's two half2 words: row
    g, row g + 8. Two neighbouring tiles are the A fragment of one `multiply_tile`.
    """
    tiles = array.registers.shape[1]
    return [
        [
            Word(llvm.bitcast(_i32(), array.registers[0, i, 0, 0, half, 0, 0, 0, 0]))
            for half in (0, 1)
        ]
        for i in range(tiles)
    ]


def rows_of(array: Any) -> list[Real]:
    """This lane's two values, rows g and g + 8, of a float32 (64,) array in
    `Layout.WGMMA.reduce(1)`.
    """
    flat = list(array.registers.flat)
    assert len(flat) == 2, array.registers.shape
    return [Real(_element(x, 0)) if isinstance(x.type, ir.VectorType) else Real(x) for x in flat]


def _element(register: Any, i: int) -> Any:
    at = ir.DenseI64ArrayAttr.get([i])
    return vector.extract(register, dynamic_position=[], static_position=at)


def _pair(register: Any) -> list[Any]:
    return [_element(register, i) for i in (0, 1)]


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def _advance(pointer: Any, offset: Word | int) -> Any:
    if isinstance(offset, int) and offset == 0:
        return pointer
    return utils.getelementptr(pointer, [word(offset).value], ir.IntegerType.get_signless(8))


def _asm(result: Any, args: Sequence[Any], text: str, constraints: str) -> Any:
    return llvm.inline_asm(result, list(args), text, constraints, has_side_effects=False)


def _asm_void(text: str) -> None:
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "~{memory}", has_side_effects=True)
