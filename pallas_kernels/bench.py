"""`python -m pallas_kernels.bench --ops attention --json out.json`: the kernels' times on a GPU.

Every op lists its rows in `<op>/bench.py`; a group of ops is one entry of `GROUPS`. Each row has
the time of a call (`timing`), the time that its bytes or its FLOP need at the copy bandwidth and
the GEMM rate measured in the same run, its share of that limit, and what other kernels take
(`peers`).
"""

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax

from pallas_kernels import timing
from pallas_kernels.benchmark import Benchmark
from pallas_kernels.block_select import bench as block_select
from pallas_kernels.grouped_matmul import bench as grouped_matmul
from pallas_kernels.grouped_matmul import training_bench as experts_in_training
from pallas_kernels.kv_insert import bench as kv_insert
from pallas_kernels.peers import MICROSECONDS, PEERS
from pallas_kernels.route import bench as route
from pallas_kernels.scaled_matmul import bench as scaled_matmul
from pallas_kernels.sparse_attention import bench as sparse_attention
from pallas_kernels.window_attention import bench as window_attention

GROUPS: dict[str, tuple[Benchmark, ...]] = {
    "attention": (
        *block_select.BENCHMARKS,
        *sparse_attention.BENCHMARKS,
        *kv_insert.BENCHMARKS,
        *window_attention.BENCHMARKS,
    ),
    "moe": (*grouped_matmul.BENCHMARKS, *experts_in_training.BENCHMARKS),
    "linear": (*scaled_matmul.BENCHMARKS, *route.BENCHMARKS),
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the device does in this run."""

    bytes_a_second: float
    flops_a_second: float

    def microseconds(self, row: Benchmark) -> float:
        """The least time of a row: the larger of moving its bytes and doing its FLOP."""
        seconds = row.bytes / self.bytes_a_second, row.flops / self.flops_a_second
        return max(seconds) * 1e6


@dataclass(frozen=True, kw_only=True)
class Result:
    """A row as it was measured, or why it was not."""

    name: str
    bytes: int
    flops: int
    limit_us: float
    aim_us: float | None
    us: float | None
    kernels_us: float | None = None  # of kernels alone, without launches
    failure: str = ""

    @property
    def cells(self) -> list[str]:
        """The row of the table."""
        peers = [_number(MICROSECONDS.get(self.name, {}).get(peer)) for peer in PEERS]
        rate, share = "-", "-"
        if self.us is not None:
            rate = f"{self.bytes / self.us / 1e6:.2f}" if self.bytes else "-"
            share = f"{self.limit_us / self.us:.0%}"
        return [
            self.name,
            _number(self.us),
            _number(self.kernels_us),
            rate,
            _number(self.limit_us),
            share,
            _number(self.aim_us),
            *peers,
        ]


HEADER = ["case", "us", "kernels us", "TB/s", "limit us", "share", "aim us", *PEERS]


def main(argv: Sequence[str] | None = None) -> None:
    """Times the rows that were asked for; prints the table, and writes JSON if told to."""
    options = _parser().parse_args(argv)
    if jax.default_backend() != "gpu":
        sys.exit(f"the benchmark needs a GPU, and JAX runs on {jax.default_backend()}")
    limits = Limits(bytes_a_second=timing.copy_bandwidth(), flops_a_second=timing.gemm_rate())
    rows = [row for ops in options.ops for row in GROUPS[ops] if options.only in row.name]
    results = []
    for row in rows:
        results.append(measure(row, limits))
        print("  ".join(results[-1].cells), flush=True)
    report = {**_surroundings(), **asdict(limits), "rows": [asdict(result) for result in results]}
    print(table(results))
    print(_sentence(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", "utf-8")


def measure(row: Benchmark, limits: Limits) -> Result:
    """One row; a kernel that fails leaves its message and does not end the run."""
    time, failure = None, ""
    try:
        time = timing.time_of_a_call(row.make())
    except (ValueError, RuntimeError) as error:
        failure = f"{type(error).__name__}: {error}"
        print(f"{row.name}: {failure}", file=sys.stderr)
    return Result(
        name=row.name,
        bytes=row.bytes,
        flops=row.flops,
        limit_us=limits.microseconds(row),
        aim_us=row.aim_us,
        us=None if time is None else time.whole,
        kernels_us=None if time is None else time.kernels,
        failure=failure,
    )


def table(results: Sequence[Result]) -> str:
    """The results in Markdown."""
    lines = [HEADER, ["---"] * len(HEADER), *(result.cells for result in results)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=__doc__)
    known = ", ".join(GROUPS)
    parser.add_argument("--ops", type=_groups, required=True, help=f"one or more of {known}")
    parser.add_argument("--only", default="", help="just the rows whose name contains this")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    return parser


def _groups(text: str) -> list[str]:
    """Groups of ops, as in `moe,linear`."""
    names = text.split(",")
    for name in names:
        if name not in GROUPS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(GROUPS)}")
    return names


def _surroundings() -> dict[str, str]:
    return {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def _sentence(report: dict) -> str:
    return (
        f"{report['date']}, {report['device']}, JAX {report['jax']}: "
        f"copy {report['bytes_a_second'] / 1e12:.2f} TB/s (read and written), "
        f"GEMM {report['flops_a_second'] / 1e12:.0f} TFLOP/s (bf16)."
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


if __name__ == "__main__":
    main()
