"""Mosaic kernels of several warpgroups in array code, on a CPU: a thread for each team, in numpy.

Teams meet at the kernel's own barriers, so a missing one hangs or spoils the result. `launch` runs
every program of a grid on emulated references; memory that no kernel wrote is NaN. What is checked
besides: a copy's shape, an operand's type, that nobody waits for a barrier more than one phase
late, which a parity cannot tell from too early.
"""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from tests.ops import emulated_lanes, emulated_refs

_PATIENCE = 60  # seconds for a barrier
_own = threading.local()  # what `axis_index` answers
_lanes_lock = threading.Lock()  # emulated lanes have one mask for all


class Ref(emulated_refs.Ref):
    """Memory in its own order, whatever its tiles are on the device."""

    def __getitem__(self, where):
        found = self.array[where]
        return found.copy() if isinstance(found, np.ndarray) else found

    def __setitem__(self, where, values):
        assert self.array[where].shape == values.shape, (self.array[where].shape, values.shape)
        self.array[where] = values

    def transpose(self, axes):
        return Ref(np.transpose(self.array, axes))


class Barrier:
    """`num_barriers` barriers, each open once `num_arrivals` have come."""

    def __init__(self, num_arrivals=1, num_barriers=1):
        self.arrivals, self.come = num_arrivals, [0] * num_barriers
        self.waited, self.changed = {}, threading.Condition()

    @property
    def at(self):
        return _Chosen(self)

    def arrive(self, which=0):
        with self.changed:
            self.come[which] += 1
            self.changed.notify_all()

    def wait(self, which=0):
        key = which, threading.get_ident()
        with self.changed:
            phase = self.waited.get(key, 0)
            assert self.come[which] < (phase + 2) * self.arrivals, "a phase was missed"
            ready = (phase + 1) * self.arrivals
            assert self.changed.wait_for(lambda: self.come[which] >= ready, _PATIENCE), "deadlock"
            self.waited[key] = phase + 1


class _Chosen:
    """`barriers.at[i]`."""

    def __init__(self, barrier, which=0):
        self.barrier, self.which = barrier, which

    def __getitem__(self, which):
        return _Chosen(self.barrier, int(which))

    def arrive(self):
        self.barrier.arrive(self.which)

    def wait(self):
        self.barrier.wait(self.which)


class _Accumulator:
    def __init__(self, values):
        self.values = np.array(values, np.float32)
        self.shape = self.values.shape

    def __getitem__(self, _):
        return self.values.copy()


def _wgmma(sums, a, b):
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    a, b = (np.asarray(getattr(x, "array", x), np.float32) for x in (a, b))
    sums.values += a @ b


def _copy_in(source, to, barrier):
    assert source.shape == to.shape and source.dtype == to.dtype, (source.shape, to.shape)
    to.array[...] = source.array
    barrier.arrive()


def _copy_out(source, to):
    assert source.shape == to.shape and source.dtype == to.dtype, (source.shape, to.shape)
    to.array[...] = source.array


def _broadcast(x, shape, axes):
    own = [size if axis in axes else 1 for axis, size in enumerate(shape)]
    return np.broadcast_to(x.reshape(own), shape)


def _run_scoped(function, *shapes):
    return function(*(_Accumulator(np.zeros(shape)) for shape in shapes))


def _run_state(function):
    def run(values):
        refs = tuple(_Accumulator(x) for x in values)
        function(refs)
        return tuple(one.values for one in refs)

    return run


def _loop(start, stop, body, carry):
    for i in range(int(start), int(stop)):
        carry = body(i, carry)
    return carry


def _locked_code(*_arguments, returns=None):
    def wrap(function):
        def run(*values):
            with _lanes_lock:
                return function(None, *values)

        return run

    return wrap


def rows_of(array):
    """What a lane has of rows: g and g + 8 of its warp's 16."""
    thread = np.arange(emulated_lanes.THREADS)
    row = 16 * (thread // 32) + thread % 32 // 4
    return [emulated_lanes.Real(np.asarray(array)[row + 8 * half]) for half in (0, 1)]


def _lane_rows_and_columns(columns):
    """Row and column of each of a lane's values, per 8 columns, as `lanes.tiles_of` has them."""
    thread = np.arange(emulated_lanes.THREADS)
    row, column = 16 * (thread // 32) + thread % 32 // 4, 2 * (thread % 4)
    return [
        [(row + 8 * (i // 2), 8 * n + column + i % 2) for i in range(4)]
        for n in range(columns // 8)
    ]


def _tiles_of(array):
    array = np.asarray(array)
    places = _lane_rows_and_columns(array.shape[1])
    return [[emulated_lanes.Real(array[at]) for at in tile] for tile in places]


def _array_of(tiles):
    array = np.zeros((64, 8 * len(tiles)), np.float32)
    for places, values in zip(_lane_rows_and_columns(array.shape[1]), tiles, strict=True):
        for at, value in zip(places, values, strict=True):
            array[at] = value.value
    return array


def _bf16_accumulator(tiles):
    array = np.zeros((64, 8 * len(tiles)), ml_dtypes.bfloat16)
    for places, words in zip(_lane_rows_and_columns(array.shape[1]), tiles, strict=True):
        for half, word in enumerate(words):
            pair = emulated_lanes.pair_of(word, ml_dtypes.bfloat16)
            for e in (0, 1):
                array[places[2 * half + e]] = pair[:, e]
    return array


def _accumulators():
    make = lambda shape, _dtype: shape  # noqa: E731
    make.init = lambda values: values
    return make


def _fakes() -> dict[str, Any]:
    nothing = lambda *_arguments, **_options: None  # noqa: E731
    return {
        "_ACC": _accumulators(),
        "_WGMMA": SimpleNamespace(reduce=nothing),
        "pl": SimpleNamespace(
            when=lambda condition: (lambda do: do()) if condition else nothing,
            ds=lambda first, size: slice(int(first), int(first) + size),
            run_scoped=_run_scoped,
            run_state=_run_state,
        ),
        "plgpu": SimpleNamespace(
            wgmma=_wgmma,
            copy_gmem_to_smem=_copy_in,
            copy_smem_to_gmem=_copy_out,
            barrier_wait=lambda barrier: barrier.wait(),
            barrier_arrive=lambda barrier: barrier.arrive(),
            layout_cast=lambda array, _layout: array,
            set_max_registers=nothing,
            commit_smem=nothing,
            wait_smem_to_gmem=nothing,
        ),
        "lax": SimpleNamespace(
            axis_index=lambda name: _own.index[name],
            rem=lambda a, b: int(a) % int(b),
            div=lambda a, b: int(a) // int(b),
            fori_loop=_loop,
            broadcast_in_dim=_broadcast,
        ),
        "jnp": SimpleNamespace(**{**vars(np), "bfloat16": ml_dtypes.bfloat16}),
        "lanes": SimpleNamespace(
            **{
                **vars(emulated_lanes),
                "code": _locked_code,
                "rows_of": rows_of,
                "tiles_of": _tiles_of,
                "array_of": _array_of,
                "bf16_accumulator": _bf16_accumulator,
            },
            REF=None,
            SCALAR=None,
        ),
    }


def launch(
    monkeypatch,
    modules,
    kernel: Callable,
    grid: dict[str, int],
    teams: int,
    refs,
    scratch: Callable,
):
    """Runs all programs of a grid on these references, each with new memory of `scratch()`."""
    with monkeypatch.context() as patch:
        for (name, fake), module in itertools.product(_fakes().items(), modules):
            if hasattr(module, name):
                patch.setattr(module, name, fake)
        for place in itertools.product(*map(range, grid.values())):
            _run_program(kernel, dict(zip(grid, place, strict=True)), teams, [*refs, *scratch()])


def _run_program(kernel, index, teams, refs):
    def run(team):
        _own.index = {**index, "team": team}
        with np.errstate(invalid="ignore", over="ignore"):
            kernel(*refs)

    with ThreadPoolExecutor(teams) as threads:
        for one in [threads.submit(run, team) for team in range(teams)]:
            one.result()
