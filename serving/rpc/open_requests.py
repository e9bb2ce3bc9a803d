"""The requests that one listener is answering: how many, under which ids, and when none is left."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from serving.rpc.statuses import Refused


@dataclass(slots=True)
class OpenRequest:
    """A request being answered; `is_aborted` even where the engine does not have it yet."""

    is_aborted: bool = False


class OpenRequests:
    """Admits up to `limit` requests, each under an id of its own, until no new ones are taken."""

    def __init__(self, limit: int):
        self._limit = limit
        self._open: dict[str, OpenRequest] = {}
        self._is_closing = False
        self._none_left = asyncio.Event()
        self._none_left.set()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def ids(self) -> list[str]:
        """The ids, the oldest first."""
        return list(self._open)

    @property
    def is_closing(self) -> bool:
        """Whether no new ones are taken."""
        return self._is_closing

    @contextmanager
    def answering(self, request_id: str) -> Iterator[OpenRequest]:
        """Counts a request in while it is answered. Raises Refused before anything is changed."""
        if self._is_closing:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
        if request_id in self._open:
            text = f"request_id={request_id!r} is being answered already"
            raise Refused(grpc.StatusCode.ALREADY_EXISTS, text)
        if len(self._open) >= self._limit:
            text = f"{len(self._open)} requests are being answered, at most {self._limit} can be"
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        self._open[request_id] = request = OpenRequest()
        self._none_left.clear()
        try:
            yield request
        finally:
            del self._open[request_id]
            if not self._open:
                self._none_left.set()

    def abort(self, request_id: str) -> bool:
        """Marks a request as aborted; whether it is one of these."""
        request = self._open.get(request_id)
        if request is not None:
            request.is_aborted = True
        return request is not None

    def take_no_more(self) -> None:
        """Refuses whatever comes from now on."""
        self._is_closing = True

    async def none_left(self, timeout_s: float) -> bool:
        """Waits until all are answered, so long at most; whether they are."""
        try:
            await asyncio.wait_for(self._none_left.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
