"""Where the optimiser's moments are between updates: on the device, in the host's memory, or in
files of the run's folder. They come back bit for bit, so that a run does not depend on it.
"""

import resource
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from rl.optimizer import TrainState

FOLDER = "moments"
KIBIBYTE, GIBIBYTE = 1 << 10, 1 << 30


class Moments:
    """Takes the optimiser's part of a state away after an update, and brings it before the next."""

    def __init__(self, where: Literal["none", "host", "disk"], out: Path):
        """`out` is the run's folder."""
        self._where, self._folder = where, out / FOLDER
        self._homes: Any = None  # the shardings of what is away

    def away(self, state: TrainState) -> TrainState:
        """The state with its moments where they belong; the device has none of them then."""
        if self._where == "none":
            return state
        self._homes = jax.tree.map(lambda x: x.sharding, state.optimizer)
        parked = jax.device_get(state.optimizer)
        if self._where == "disk":
            leaves, tree = jax.tree.flatten(parked)
            parked = tree.unflatten([self._filed(i, leaf) for i, leaf in enumerate(leaves)])
        return replace(state, optimizer=parked)

    def back(self, state: TrainState) -> TrainState:
        """The state with its moments on the device again, where each was."""
        if self._where == "none":
            return state
        # copies: on a CPU the arrays would be the host's own, or pages of a file
        moments = jax.tree.map(
            lambda x, home: jax.device_put(np.array(x), home), state.optimizer, self._homes
        )
        return replace(state, optimizer=moments)

    def _filed(self, number: int, leaf: np.ndarray) -> np.ndarray:
        """A leaf as a view of its file. The file is replaced and never written over, since a
        checkpoint may still be reading the old one.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        new = self._folder / f"{number}.new.npy"
        np.save(new, leaf)
        return np.load(new.replace(self._folder / f"{number}.npy"), mmap_mode="r")


def peak_memory() -> dict[str, float]:
    """The most that this process held so far, in GiB: on the host, and on a device that says so."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    scale = 1 if sys.platform == "darwin" else KIBIBYTE  # bytes there, KiB elsewhere
    found = {"perf/cpu_memory_used_gb": most * scale / GIBIBYTE}
    stats: dict[str, Any] = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        found["perf/max_memory_allocated_gb"] = stats["peak_bytes_in_use"] / GIBIBYTE
    return found
