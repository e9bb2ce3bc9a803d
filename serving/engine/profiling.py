"""A profile of some device steps, which begins and ends by itself as steps are dispatched."""

from serving.device_api import Device
from serving.engine_api import EngineBusyError, Profile


class Profiling:
    """At most one profile at a time; used on the engine's thread alone."""

    def __init__(self, device: Device):
        self._device = device
        self._profile: Profile | None = None
        self._steps = 0  # dispatched since it was asked for
        self._is_on = False

    def start(self, profile: Profile) -> None:
        """Asks for a profile. EngineBusyError while another one is not over."""
        if self._profile is not None:
            raise EngineBusyError(f"a profile runs already, into {self._profile.folder}")
        self._profile, self._steps = profile, 0
        self._begin_if_due()

    def stop(self) -> str:
        """Ends the profile; its folder. EngineBusyError where none runs."""
        profile = self._profile
        if profile is None:
            raise EngineBusyError("no profile runs")
        self._end()
        return profile.folder

    def dispatched(self) -> None:
        """Counts a step."""
        profile = self._profile
        if profile is None:
            return
        self._steps += 1
        if profile.num_steps is not None:
            last = profile.start_step + profile.num_steps
            if self._steps >= last:
                self._end()
                return
        self._begin_if_due()

    def _begin_if_due(self) -> None:
        profile = self._profile
        if profile is not None and not self._is_on and self._steps >= profile.start_step:
            self._device.start_profile(profile)
            self._is_on = True

    def _end(self) -> None:
        is_on, self._profile, self._is_on = self._is_on, None, False
        if is_on:
            self._device.stop_profile()
