"""What the engine needs of whatever runs its plans: the device, or one that stands in for it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import UInt32

from serving.engine_api import Profile
from serving.scheduling.plan import StepPlan, StepResult
from serving.scheduling.sampling_params import SamplingParams

Slot = tuple[int, int]  # data rank, slot
Mask = UInt32[np.ndarray, "places words"]  # of the next token, and of those after each draft


class Running(Protocol):
    """A dispatched step."""

    def result(self) -> StepResult:
        """What it gave; blocks until it is there."""
        ...


class Device(Protocol):
    """Runs plans in the order in which they are dispatched."""

    @property
    def num_blocks(self) -> int:
        """Blocks of each data rank's pool."""
        ...

    def check(self, sampling: SamplingParams) -> None:
        """Raises ValueError with a sentence for options that no row can have; called on any
        thread, before a request is queued.
        """
        ...

    def dispatch(self, plan: StepPlan, masks: Mapping[Slot, Mask]) -> Running:
        """Starts a step and does not wait for it. `masks` are those of sequences with a grammar,
        in the form of `minimax_jax.sampling.packed_mask`.
        """
        ...

    def experts(self, rank: int, block_ids: Sequence[int], count: int) -> np.ndarray:
        """The experts of the first `count` tokens in these blocks, uint8 [count, layers, experts a
        token], as of the last result; asked for with `enable_return_routed_experts` alone.
        """
        ...

    def update(self, *, params: Any = None, adapters: Mapping[str, Any] | None = None) -> None:
        """From the next step on, other weights or adapters. Raises ValueError with a sentence when
        they do not fit those that are there, before anything is changed.
        """
        ...

    def start_profile(self, profile: Profile) -> None:
        """Begins to profile device steps. The engine counts them: this is called just before the
        first one that is wanted, and `stop_profile` after the result of the last.
        """
        ...

    def stop_profile(self) -> None:
        """Ends the profile and writes it."""
        ...


class Others(Protocol):
    """The devices of the other processes, which do what this process's does, in its order. They
    are told of a program before it runs here, so that none waits for one that knows of nothing.
    """

    def run(self, name: str, adapter: str | None, host: tuple[Any, ...], times: int) -> None:
        """Run a program so often, with these arrays of the host."""
        ...

    def update(self, adapters: Mapping[str, Any]) -> None:
        """Take these adapters from now on."""
        ...

    def start_profile(self, profile: Profile) -> None:
        """Begin to profile."""
        ...

    def stop_profile(self) -> None:
        """End the profile."""
        ...
