"""A profile of some device steps, which begins and ends by itself as steps are run."""

from dataclasses import replace

from serving.device_api import Device
from serving.engine_api import EngineBusyError, Profile


class Profiling:
    """At most one profile at a time; used on the engine's thread alone."""

    def __init__(self, device: Device):
        self._device = device
        self._profile: Profile | None = None
        self._first: int | None = None  # the step with which it begins, once one was dispatched
        self._is_on = False

    def start(self, profile: Profile) -> None:
        """Asks for a profile. EngineBusyError while another one is not over."""
        if self._profile is not None:
            raise EngineBusyError(f"a profile runs already, into {self._profile.folder}")
        self._profile, self._first = profile, None

    def stop(self) -> str:
        """Ends the profile; its folder. EngineBusyError where none runs."""
        profile = self._profile
        if profile is None:
            raise EngineBusyError("no profile runs")
        is_on, self._profile, self._is_on = self._is_on, None, False
        if is_on:
            self._device.stop_profile()
        return profile.folder

    def dispatches(self, step: int) -> None:
        """Begins with this step, if it is the first one wanted."""
        profile = self._profile
        if profile is None:
            return
        if self._first is None:
            self._first = step + profile.start_step
        if step == self._first:
            self._device.start_profile(replace(profile, start_step=0, num_steps=None))
            self._is_on = True

    def landed(self, step: int) -> None:
        """Ends after this step, if it is the last one wanted."""
        profile = self._profile
        if profile is None or profile.num_steps is None or self._first is None:
            return
        if step >= self._first + profile.num_steps - 1:
            self.stop()
