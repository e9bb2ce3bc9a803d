"""Copies from device memory to shared memory that a lane starts and waits for itself (`cp.async`):
what it copied is there for it after its own wait, for its warp after a `sync_warp` on top of that.
"""

from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.lanes.registers import Word, i32, word


def copy_async(to: Any, source: Any, size: Word) -> None:
    """Starts a copy of 16 bytes, past the L1: the first `size` (0 or 16) from `source`, then zeros.
    Both addresses are multiples of 16.
    """
    text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
    _emit([llvm.ptrtoint(i32(), to), source, word(size).value], text, "r,l,r,~{memory}")


def commit_copies() -> None:
    """Makes a group of the copies that this lane started since its last group."""
    _emit([], "cp.async.commit_group;", "~{memory}")


def wait_for_copies(under_way: int) -> None:
    """Waits until that many of this lane's groups, the newest ones, may still be on their way."""
    _emit([], f"cp.async.wait_group {under_way};", "~{memory}")


def _emit(args: Sequence[Any], text: str, constraints: str) -> None:
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, list(args), text, constraints, has_side_effects=True)
