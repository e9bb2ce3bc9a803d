"""Counts what this process compiles, by JAX's own events: a program from the cache on disk counts
too, since requests wait for it as well.
"""

import jax

COMPILED = "/jax/core/compile/backend_compile_duration"


class CompilationCounter:
    """How many programs were compiled since it was made, until it is closed."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def close(self) -> None:
        """Stops to count."""
        jax.monitoring.unregister_event_duration_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILED:
            self.count, self.seconds = self.count + 1, self.seconds + duration_secs
