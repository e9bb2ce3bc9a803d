"""Sends requests, at most so many at a time, until all are answered or time is up."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from serving.bench.answers import Answer
from serving.bench.asks import Ask
from serving.bench.client import AskError, Client


class Load:
    """What has been sent over a client; `answers` in the order in which they ended."""

    def __init__(
        self,
        client: Client,
        *,
        max_concurrency: int | None = None,
        on_end: Callable[[Answer], None] = lambda answer: None,
    ):
        self.answers: list[Answer] = []
        self._client, self._on_end = client, on_end
        self._room = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)

    async def send(self, ask: Ask) -> Answer:
        """Waits for room, then for the answer, which says itself whether it failed. A cancelled
        request that was sent is among the answers too.
        """
        if self._room is None:
            return await self._send(ask)
        async with self._room:
            return await self._send(ask)

    async def _send(self, ask: Ask) -> Answer:
        answer = Answer(request_id=ask.request_id, is_measured=ask.is_measured)
        try:
            await self._client.ask(ask, answer)
            if not answer.times:
                answer.error = "the answer has no token"
        except AskError as error:
            answer.error = str(error)
        except asyncio.CancelledError:
            answer.is_cancelled = True
            raise
        finally:
            self.answers.append(answer)
            self._on_end(answer)
        return answer


async def send_at(load: Load, asks: Sequence[Ask], times: Iterable[float]) -> None:
    """Sends each request so many seconds from now, in an order of the times."""
    start = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as group:
        for ask, seconds in zip(asks, times, strict=True):
            delay = start + seconds - asyncio.get_running_loop().time()
            if delay > 0:
                await asyncio.sleep(delay)
            group.create_task(load.send(ask))


async def until(
    work: Coroutine[Any, Any, None], stop: asyncio.Event, duration: float | None
) -> bool:
    """Does the work until it is done, time is up, or `stop` is set; what runs then is cancelled.
    Whether it was done.
    """
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, timeout=duration, return_when=asyncio.FIRST_COMPLETED)
        is_done = task.done()
    finally:
        task.cancel()
        stopped.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)
    if is_done:
        task.result()
    return is_done
