"""Arithmetic of float32 and of pairs of float16, conversions, and products of one warp."""

from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.lanes.registers import (
    Real,
    Word,
    asm,
    bits_of_real,
    element,
    i32,
    pair_of,
    real_of_bits,
    word,
)


def half2(x: Word) -> Any:
    """The word as vector<2xf16>."""
    return llvm.bitcast(ir.VectorType.get((2,), ir.F16Type.get()), x.value)


def multiply_half2(a: Word, b: Word) -> Word:
    """Two float16 products."""
    return Word(llvm.bitcast(i32(), arith.mulf(half2(a), half2(b))))


def multiply_bf16(a: Word, b: Word) -> Word:
    """Two bfloat16 products, subnormals kept."""
    return Word(asm(i32(), [a.value, b.value], "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r"))


def bit_select(mask: int, ones: Word, zeros: Word) -> Word:
    """The bits of `ones` where the mask has them, of `zeros` elsewhere: one instruction, which the
    compiler cannot take apart (it would, to distribute a later mask over its parts).
    """
    args = [word(mask).value, ones.value, zeros.value]
    return Word(asm(i32(), args, "lop3.b32 $0, $1, $2, $3, 0xCA;", "=r,r,r,r"))


def permute_bytes(a: Word, b: Word, selector: int) -> Word:
    """Four of the eight bytes of a (0..3) and b (4..7), the lowest nibble choosing the lowest; with
    8 more it is a byte's sign, in all bits.
    """
    args = [a.value, b.value, word(selector).value]
    return Word(asm(i32(), args, "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r"))


def count_bits(x: Word) -> Word:
    """How many bits are set."""
    return Word(asm(i32(), [x.value], "popc.b32 $0, $1;", "=r,r"))


def half2_of_e4m3(x: Word) -> Word:
    """The float16 values of the two E4M3 bytes in the low half of x, exact; NaN stays NaN."""
    text = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; cvt.rn.f16x2.e4m3x2 $0, lo; }"
    return Word(asm(i32(), [x.value], text, "=r,r"))


def e4m3_of_reals(low: Real, high: Real) -> Word:
    """Two float32 values as E4M3 bytes: nearest, ties to even, saturating; NaN is 0x7F."""
    text = "{ .reg .b16 both; cvt.rn.satfinite.e4m3x2.f32 both, $1, $2; cvt.u32.u16 $0, both; }"
    return Word(asm(i32(), [high.value, low.value], text, "=r,f,f"))


def bf16_of_reals(low: Real, high: Real) -> Word:
    """Two float32 values rounded to bfloat16."""
    args = [high.value, low.value]
    return Word(asm(i32(), args, "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f"))


def half2_of_reals(low: Real, high: Real) -> Word:
    """Two float32 values rounded to float16."""
    args = [high.value, low.value]
    return Word(asm(i32(), args, "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f"))


def reals_of_pair(x: Word, halves: bool) -> list[Real]:
    """The two float16 (`halves`), or bfloat16, of a word, the low one first."""
    if halves:
        wide = arith.extf(ir.VectorType.get((2,), ir.F32Type.get()), half2(x))
        return [Real(one) for one in pair_of(wide)]
    return [real_of_bits(x << 16), real_of_bits(x & 0xFFFF0000)]


def reals_of_half2(x: Word) -> list[Real]:
    """The two float16 values of a word."""
    wide = arith.extf(ir.VectorType.get((2,), ir.F32Type.get()), half2(x))
    return [Real(element(wide, i)) for i in (0, 1)]


def maximum(a: Real, b: Real) -> Real:
    """The greater one; a NaN loses to every number."""
    return Real(arith.maxnumf(a.value, b.value))


def minimum(a: Real, b: Real) -> Real:
    """The smaller one; a NaN loses to every number."""
    return Real(arith.minnumf(a.value, b.value))


def absolute(x: Real) -> Real:
    """|x|."""
    return real_of_bits(bits_of_real(x) & 0x7FFFFFFF)


def multiply_add(a: Real, b: Real, c: Real) -> Real:
    """a b + c, rounded once."""
    args = [a.value, b.value, c.value]
    return Real(asm(ir.F32Type.get(), args, "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f"))


def rsqrt(x: Real) -> Real:
    """1 / sqrt(x), approximately (2^-22.9)."""
    return Real(asm(ir.F32Type.get(), [x.value], "rsqrt.approx.f32 $0, $1;", "=f,f"))


def exp2(x: Real) -> Real:
    """2^x, approximately (2 units in the last place); 0 for -inf."""
    return Real(asm(ir.F32Type.get(), [x.value], "ex2.approx.ftz.f32 $0, $1;", "=f,f"))


def log2(x: Real) -> Real:
    """The logarithm, approximately; -inf for 0."""
    return Real(asm(ir.F32Type.get(), [x.value], "lg2.approx.ftz.f32 $0, $1;", "=f,f"))


def multiply_tile(sums: Sequence[Real], a: Sequence[Word], b: Sequence[Word]) -> list[Real]:
    """mma.m16n8k16: 4 sums of this lane plus the product of half2 fragments a [4] and b [2]."""
    f32 = ir.F32Type.get()
    result = ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>")
    text = (
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    args = [x.value for x in (*a, *b, *sums)]
    out = asm(result, args, text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f")
    return [Real(llvm.extractvalue(f32, out, [i])) for i in range(4)]
