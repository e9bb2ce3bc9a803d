"""The life of a serving process: parts that start one after the other, and drain and stop together.

async with Lifetime() as life:
    await life.start(server)
    await life.ended()
"""

import asyncio
import logging
import signal
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

LOG = logging.getLogger(__name__)
SIGNALS = (signal.SIGTERM, signal.SIGINT)
T = TypeVar("T")


class Part(Protocol):
    """A listener, or whatever else takes requests."""

    async def start(self) -> Any:
        """Begins; ValueError with a sentence when it cannot."""
        ...

    async def drain(self, hurry: asyncio.Event | None = None) -> None:
        """Takes nothing new and lets what runs end; what has not ended when `hurry` is set is cut
        off.
        """
        ...

    async def stop(self) -> None:
        """Ends at once."""
        ...


class EndedEarlyError(Exception):
    """A signal came before the server was ready."""


class Lifetime:
    """Ends by SIGTERM, SIGINT or a fault; a second signal cuts the draining short."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._ended, self._hurry = asyncio.Event(), asyncio.Event()
        self.fault = ""

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._signalled)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                LOG.info("draining")
                await asyncio.gather(*(part.drain(self._hurry) for part in self._parts))
        finally:
            for part in reversed(self._parts):
                await part.stop()
            for number in SIGNALS:
                asyncio.get_running_loop().remove_signal_handler(number)

    async def start(self, part: Part) -> Any:
        """Starts a part, which is stopped at the end; what its `start` gives."""
        self._parts.append(part)
        return await self.unless_ended(part.start())

    async def unless_ended(self, work: Coroutine[Any, Any, T]) -> T:
        """What the work gives. Raises EndedEarlyError when a signal comes first."""
        task, ended = asyncio.ensure_future(work), asyncio.ensure_future(self._ended.wait())
        await asyncio.wait((task, ended), return_when=asyncio.FIRST_COMPLETED)
        early = not task.done()
        for one in (ended, *([task] if early else [])):
            one.cancel()
            await asyncio.gather(one, return_exceptions=True)
        if early:
            raise EndedEarlyError
        return await task

    def end(self, fault: str) -> None:
        """Ends it because of a fault, of which `fault` is the sentence."""
        self.fault = self.fault or fault
        self._ended.set()

    def drain(self) -> None:
        """Ends it in good order, as the first signal does."""
        self._ended.set()

    async def ended(self) -> None:
        """Waits for the end."""
        await self._ended.wait()

    def _signalled(self) -> None:
        (self._hurry if self._ended.is_set() else self._ended).set()
