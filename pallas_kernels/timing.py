"""How long a kernel takes on the device: the slope over chained calls inside one program.

A single call of a short kernel is mostly launch and host; so n calls stand in one jitted program,
which runs as one command buffer, and the time of a call is the slope between two values of n. The
calls wait for one another, each has operands of its own (so that XLA cannot merge two of them), and
these name different memory, so that nothing is read twice from the L2.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.device_timeline import Timeline, profiled

REPEATS = 7  # timings of a program; the median counts
QUEUED = 4  # runs of a program that are queued at once, so that the device never waits for the host
# Calls stand one after the other in a recorded command buffer, as the layers of a model do.
_OPTIONS: dict[str, str | bool] = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}
_COPIED_BYTES = 4 * 2**30  # far beyond any cache, and long enough to hide the launch
_GEMM_WIDTH = 8192


@dataclass(frozen=True)
class Chain:
    """Calls to be timed: `call(constants, carry, operands)` gives (carry, output).

    `constants` are shared by all calls, `carry` is donated and goes from call to call, `operands`
    has one entry a call, arrays (or trees of them) that differ between neighbours.
    """

    call: Callable[[Any, Any, Any], tuple[Any, Any]]
    constants: Any
    carry: Any
    operands: Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class CallTime:
    """Microseconds of a call with its launches and whatever the host adds, and the kernels of one
    run of all calls, as the profiler saw them.
    """

    whole: float
    timeline: Timeline
    first_calls: float  # seconds of the programs' first runs, which compiled them
    outputs: list[Any]  # of each of all calls, in one run

    @property
    def kernels(self) -> float | None:
        """Microseconds of a call's kernels alone; None where the profiler sees no device."""
        return self.timeline.busy_us or None


def time_of_a_call(chain: Chain) -> CallTime:
    """The slope of the time over the number of chained calls, all of them and a third of them; and
    the kernels of one run of all.
    """
    many, few = len(chain.operands), max(1, len(chain.operands) // 3)
    assert many > few, "a slope needs two numbers of calls"
    run, slow = _seconds(chain, chain.carry, many)
    timeline = replace(profiled(run.once, 1), runs=many)
    short, fast = _seconds(chain, run.carry, few)
    return CallTime(
        whole=(slow - fast) / (many - few) * 1e6,
        timeline=timeline,
        first_calls=run.first_call + short.first_call,
        outputs=run.outputs,
    )


def copy_bandwidth() -> float:
    """Bytes a second that a copy from device to device reads and writes together."""
    x = jax.random.bits(jax.random.key(0), (_COPIED_BYTES // 4,), jnp.uint32)
    return 2 * x.nbytes / _median(jax.jit(jnp.copy), x)


def gemm_rate() -> float:
    """FLOP a second of a bf16 product of two square matrices of normal numbers."""
    keys = jax.random.split(jax.random.key(1))
    a, b = (jax.random.normal(k, (_GEMM_WIDTH, _GEMM_WIDTH), jnp.bfloat16) for k in keys)
    return 2 * _GEMM_WIDTH**3 / _median(jax.jit(jnp.matmul), a, b)


@dataclass
class _Run:
    """A compiled program of several calls, the carry that its next run uses up, what the last run
    put out, and how many seconds the first one took.
    """

    program: Callable[..., Any]
    arguments: tuple[Any, ...]
    carry: Any
    outputs: Any = None
    first_call: float = 0.0

    def once(self) -> Any:
        """One more run; returns what to wait for."""
        self.carry, self.outputs = self.program(self.carry, *self.arguments)
        return self.carry, self.outputs


def _seconds(chain: Chain, carry: Any, calls: int) -> tuple[_Run, float]:
    """A program of that many calls, and the median time of a run."""

    call = jax.jit(chain.call)  # lowered once

    def run(carry, constants, operands):
        outputs = []
        for operand in operands:
            carry, output = call(constants, carry, operand)
            # The next call waits. XLA drops from a barrier what nothing uses: all outputs are kept.
            carry, output = lax.optimization_barrier((carry, output))
            outputs.append(output)
        return carry, outputs

    arguments = chain.constants, tuple(chain.operands[:calls])
    program = jax.jit(run, donate_argnums=0, compiler_options=_OPTIONS)
    runs = _Run(program, arguments, carry)
    start = time.perf_counter()
    jax.block_until_ready(runs.once())
    runs.first_call, times = time.perf_counter() - start, []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(QUEUED):
            last = runs.once()
        jax.block_until_ready(last)
        times.append((time.perf_counter() - start) / QUEUED)
    return runs, statistics.median(times)


def _median(function: Callable, *arrays: jax.Array) -> float:
    """Median time of a run of a program that takes far longer than its launch."""
    jax.block_until_ready(function(*arrays))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        outputs = [function(*arrays) for _ in range(QUEUED)]
        jax.block_until_ready(outputs)
        times.append((time.perf_counter() - start) / QUEUED)
        del outputs
    return statistics.median(times)
