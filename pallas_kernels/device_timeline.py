"""What ran on the device while something was profiled: every kernel with its time, in order."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel or copy on the device's stream."""

    name: str
    start_us: float
    us: float

    @property
    def end_us(self) -> float:
        """When it ended, on the same clock as `start_us`."""
        return self.start_us + self.us


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The kernels of some runs of one program, by the time at which they started."""

    kernels: tuple[Kernel, ...]
    runs: int

    @property
    def launches(self) -> float:
        """Kernels and copies of a run."""
        return len(self.kernels) / self.runs

    @property
    def busy_us(self) -> float:
        """Time of a run in which some kernel is running."""
        return sum(one.us for one in self.kernels) / self.runs

    @property
    def gaps(self) -> list[tuple[float, str, str]]:
        """Pauses between a kernel and the next one, the longest first, with the names of both."""
        pairs = zip(self.kernels, self.kernels[1:], strict=False)
        found = [(b.start_us - a.end_us, a.name, b.name) for a, b in pairs]
        return sorted(found, reverse=True)

    @property
    def by_name(self) -> list[tuple[str, float, float]]:
        """Kernels of one name: microseconds and launches of a run, the most time first."""
        totals: dict[str, tuple[float, int]] = {}
        for one in self.kernels:
            us, count = totals.get(one.name, (0.0, 0))
            totals[one.name] = us + one.us, count + 1
        rows = [(name, us / self.runs, count / self.runs) for name, (us, count) in totals.items()]
        return sorted(rows, key=lambda row: -row[1])


def profiled(run: Callable[[], object], runs: int) -> Timeline:
    """The timeline of `runs` calls; empty where the profiler sees no device's stream."""
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        try:
            for _ in range(runs):
                last = run()
            jax.block_until_ready(last)
        finally:
            jax.profiler.stop_trace()
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        kernels = [kernel for file in files for kernel in _device_kernels(file)]
    return Timeline(kernels=tuple(sorted(kernels, key=lambda one: one.start_us)), runs=runs)


def _device_kernels(file: Path) -> list[Kernel]:
    """Those of the first device: where there are several, all of them run the same program."""
    data = jax.profiler.ProfileData.from_file(str(file))
    return [
        Kernel(name=event.name, start_us=event.start_ns / 1e3, us=event.duration_ns / 1e3)
        for plane in data.planes
        if plane.name.startswith("/device:GPU:0")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
