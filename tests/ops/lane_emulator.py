"""The Mosaic kernels' lane code on a CPU: the 128 threads of a warpgroup in step, in numpy.

No interpreter of Pallas runs code of single lanes. So a test gives a kernel's modules another
`lanes`, whose words and reals are arrays of 128, with masks in place of branches, and the few calls
of Pallas around it: `emulate` patches them, and `launch` runs every program of a grid.
"""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.ops import emulated_lanes, emulated_memory
from tests.ops.emulated_lanes import THREADS, WARP, Real, pair_of

_LANES = SimpleNamespace(**{**vars(emulated_lanes), **vars(emulated_memory)})


class Sums:
    """A (64, N) accumulator and its product with register operands."""

    def __init__(self, columns):
        self.values = np.zeros((64, columns), np.float32)

    def __getitem__(self, _):
        """Per 8 columns the four values of each thread."""
        g, t, w = np.arange(THREADS) % WARP // 4, np.arange(THREADS) % 4, np.arange(THREADS) // WARP
        return Tiles(
            [
                Real(self.values[16 * w + g + 8 * half, 8 * n + 2 * t + e])
                for half in (0, 1)
                for e in (0, 1)
            ]
            for n in range(self.values.shape[1] // 8)
        )


class Tiles(list):
    """An array of a warpgroup as its registers, which can be added to another one."""

    def __add__(self, other):
        pairs = zip(self, other, strict=True)
        return Tiles([a + b for a, b in zip(*pair, strict=True)] for pair in pairs)


def _laid_out(array, _layout):
    sums = Sums(array.shape[1])
    sums.values[:] = array
    return sums[...]


def wgmma(sums, a, b):
    """A comes as registers [8 columns][rows g, g + 8] of pairs of B's type."""
    g, t, w = np.arange(THREADS) % WARP // 4, np.arange(THREADS) % 4, np.arange(THREADS) // WARP
    left = np.zeros((64, 8 * len(a)), np.float32)
    for n, halves in enumerate(a):
        for half, one in enumerate(halves):
            for e in (0, 1):
                left[16 * w + g + 8 * half, 8 * n + 2 * t + e] = pair_of(one, b.dtype)[:, e]
    sums.values += left @ np.asarray(b, np.float32)


def _copy(source, to, _barrier):
    to.take(source.array)


def _loop(start, stop, body, carry):
    for i in range(int(start), int(stop)):
        carry = body(i, carry)
    return carry


def _fake_pallas(program, team):
    """Stand-ins for `pl`, `plgpu` and `lax` in a kernel that runs as this program of its grid."""
    nothing = lambda *_arguments, **_options: None  # noqa: E731
    pl = SimpleNamespace(
        when=lambda condition: (lambda do: do()) if condition else nothing,
        ds=lambda first, size: slice(int(first), int(first) + size),
        run_scoped=lambda function, *sums: function(*(Sums(one.columns) for one in sums)),
    )
    plgpu = SimpleNamespace(
        ACC=lambda shape, _dtype: SimpleNamespace(columns=shape[1]),
        RefType=nothing,
        ShapeDtypeStruct=nothing,
        Layout=SimpleNamespace(WGMMA=None),
        SMEM=nothing,
        wgmma=wgmma,
        copy_gmem_to_smem=_copy,
        barrier_wait=nothing,
        barrier_arrive=nothing,
        set_max_registers=nothing,
        layout_cast=_laid_out,
        commit_smem=nothing,
        wgmma_wait=nothing,
    )
    lax = SimpleNamespace(
        axis_index=lambda name: team if name == "team" else program,
        rem=lambda a, b: a % b,
        div=lambda a, b: int(a) // int(b),
        fori_loop=_loop,
    )
    return {"pl": pl, "plgpu": plgpu, "lax": lax, "lanes": _LANES}


def launch(monkeypatch, modules, programs: int, kernel: Callable, *refs: Any, teams: int = 1):
    """Runs all programs of a grid, one after the other, on these references; a program's teams from
    the last one on.
    """
    for program, team in itertools.product(range(programs), reversed(range(teams))):
        with monkeypatch.context() as patch:
            for module in modules:
                for name, fake in {**_fake_pallas(program, team), **_names()}.items():
                    if hasattr(module, name):
                        patch.setattr(module, name, fake)
            with np.errstate(invalid="ignore", over="ignore"):
                kernel(*refs)


def _names() -> dict:
    """What the kernels import of `lanes` by name."""
    types = ("Word", "Real", "word", "real", "reals_of_half2")
    arithmetic = ("bit_select", "half2_of_e4m3", "multiply_half2", "permute_bytes")
    arithmetic += ("multiply_bf16", "select")
    memory = ("load_words", "load_bits", "load_reals", "store_reals")
    return {name: getattr(emulated_lanes, name) for name in (*types, *arithmetic, *memory)}
