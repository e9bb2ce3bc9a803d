"""What stands where the engine will be, so that listeners and probes are there before the weights:
a taken port shows at once, and whoever asks hears how far the start has come.
"""

from collections.abc import AsyncIterator, Sequence

import grpc

from serving.engine_api import Engine, EngineInfo, EngineState, Output, Profile, RankLoad
from serving.kv_feed import KvFeed
from serving.rpc.statuses import Refused
from serving.scheduling.request import Asked


class StartingEngine:
    """An `Engine` that is unhealthy and refuses requests until it becomes one."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._message = "starting"

    def say(self, message: str) -> None:
        """What is being done."""
        self._message = message

    def become(self, engine: Engine) -> None:
        """From now on all calls are the engine's."""
        self._engine = engine

    @property
    def state(self) -> EngineState:
        """The engine's, or that it is not there yet."""
        if self._engine is not None:
            return self._engine.state
        return EngineState(is_healthy=False, message=self._message)

    @property
    def info(self) -> EngineInfo:
        """What does not change."""
        return self._there.info

    @property
    def kv_events(self) -> KvFeed | None:
        """What happens to the blocks of the prefix cache."""
        return self._there.kv_events

    def submit(self, asked: Asked) -> AsyncIterator[Output]:
        """Queues a request."""
        return self._there.submit(asked)

    def abort(self, request_id: str) -> None:
        """Ends a request."""
        self._there.abort(request_id)

    def loads(self) -> Sequence[RankLoad]:
        """The load of each data rank."""
        return self._there.loads()

    async def flush(self, timeout_s: float) -> None:
        """Drops the prefix cache."""
        await self._there.flush(timeout_s)

    async def start_profile(self, profile: Profile) -> None:
        """Begins to profile."""
        await self._there.start_profile(profile)

    async def stop_profile(self) -> str:
        """Ends the profile."""
        return await self._there.stop_profile()

    @property
    def _there(self) -> Engine:
        if self._engine is None:
            raise Refused(grpc.StatusCode.UNAVAILABLE, f"not ready: {self._message}")
        return self._engine
