"""The registers of a lane: 32-bit words and float32 values, and the MLIR that they stand for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

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


def word(x: "Word | int") -> Word:
    """A constant, or the word itself."""
    if isinstance(x, Word):
        return x
    x &= 0xFFFFFFFF
    return Word(arith.constant(i32(), x - 2 * _SIGN if x & _SIGN else x))


def real(x: float) -> Real:
    """A float32 constant."""
    return Real(arith.constant(ir.F32Type.get(), x))


def real_of_bits(x: Word) -> Real:
    """The float32 with these bits."""
    return Real(llvm.bitcast(ir.F32Type.get(), x.value))


def bits_of_real(x: Real) -> Word:
    """The bits of a float32."""
    return Word(llvm.bitcast(i32(), x.value))


def select(condition: Any, yes: Any, no: Any) -> Any:
    """One of two words, or of two reals, without a branch."""
    return type(yes)(arith.select(condition, yes.value, no.value))


def i32() -> Any:
    return ir.IntegerType.get_signless(32)


def element(register: Any, i: int) -> Any:
    at = ir.DenseI64ArrayAttr.get([i])
    return vector.extract(register, dynamic_position=[], static_position=at)


def pair_of(register: Any) -> list[Any]:
    return [element(register, i) for i in (0, 1)]


def asm(result: Any, args: Sequence[Any], text: str, constraints: str) -> Any:
    return llvm.inline_asm(result, list(args), text, constraints, has_side_effects=False)


def asm_of_warp(args: Sequence[Any], text: str, constraints: str) -> Any:
    """A word that lanes of a warp find together: stays where it is, since all must be there."""
    return llvm.inline_asm(i32(), list(args), text, constraints, has_side_effects=True)


def asm_void(text: str) -> None:
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "~{memory}", has_side_effects=True)
