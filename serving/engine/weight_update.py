"""Other weights or adapters while requests run.

"drain" admits nothing new, lets what has begun end on the old weights, and changes them then.
"recompute" sends everything that runs back to the line at once; it goes on with the new weights,
which compute its tokens again. Either way the prefix cache is empty afterwards, and the weight
version, which is part of the blocks' names, is one higher.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from serving.device_api import Device
from serving.engine_api import EngineBusyError
from serving.scheduling.scheduler import Scheduler

Mode = Literal["drain", "recompute"]


@dataclass(frozen=True, kw_only=True)
class NewWeights:
    """What to change, and how; the future gets the new weight version."""

    params: Any = None
    adapters: Mapping[str, Any] | None = None
    mode: Mode = "drain"
    future: Future[int] = field(default_factory=Future)


class WeightUpdate:
    """At most one update at a time; used on the engine's thread alone."""

    def __init__(self, scheduler: Scheduler, device: Device):
        self._scheduler, self._device = scheduler, device
        self._wanted: NewWeights | None = None

    @property
    def holds_steps(self) -> bool:
        """Whether no step may be planned until the weights are changed."""
        return self._wanted is not None and self._wanted.mode == "recompute"

    def begin(self, wanted: NewWeights) -> None:
        """Asks for an update. EngineBusyError while another one is not over."""
        if self._wanted is not None:
            raise EngineBusyError("another update of the weights is on its way")
        self._wanted = wanted
        if wanted.mode == "recompute":
            self._scheduler.preempt_all()
        else:
            self._scheduler.admission.only_begun = True

    def advance(self) -> None:
        """Changes the weights if it is time."""
        wanted, scheduler = self._wanted, self._scheduler
        if wanted is None or scheduler.num_in_flight:
            return
        if wanted.mode == "drain" and scheduler.has_begun:
            return
        self._wanted, scheduler.admission.only_begun = None, False
        try:
            self._device.update(params=wanted.params, adapters=wanted.adapters)
        except ValueError as error:
            wanted.future.set_exception(error)
            return
        version = scheduler.weight_version + 1
        scheduler.set_weight_version(version)
        wanted.future.set_result(version)

    def refuse(self, error: Exception) -> None:
        """Says that the weights will not be changed any more."""
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            wanted.future.set_exception(error)
