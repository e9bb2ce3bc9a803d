"""From the engine's thread to the readers on its event loop.

The thread merges what is new of a sequence into what its reader has not taken yet, so a reader that
never comes costs one output of each sequence, not a queue of them; and it calls the loop at most
once before the loop has looked.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import NamedTuple

from serving.engine.token_run import TokenRun
from serving.engine_api import EngineError, Logprobs, Output
from serving.scheduling.request import FinishReason, Request


class End(NamedTuple):
    """Why a sequence has ended; the fields of an output."""

    reason: FinishReason
    matched_stop: int | str | None = None
    error: str = ""


class News:
    """What is new of one sequence."""

    __slots__ = ("end", "prompt_logprobs", "request", "run")

    def __init__(self, request: Request | None, run: TokenRun):
        self.request, self.run = request, run
        self.prompt_logprobs: Logprobs | None = None
        self.end: End | None = None


class Handover:
    """What all streams of an engine share: the lock, the loop, and whom to wake."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._to_wake: list[Stream] = []
        self._is_called = False

    def bind(self) -> None:
        """Takes the running loop for the engine's. EngineError while it has another one."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise EngineError("an engine is used on one event loop, and this is another one")
        with self.lock:
            self._loop, self._is_called = loop, False

    def note(self, stream: "Stream") -> None:
        """Has a stream woken at the next call of the loop; the lock is held."""
        if not stream.is_noted:
            stream.is_noted = True
            self._to_wake.append(stream)

    def call(self, act: Callable[[], None]) -> bool:
        """Has the loop do something soon; whether there is a loop that still runs."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return False
        try:
            loop.call_soon_threadsafe(act)
        except RuntimeError:  # it was closed just now
            return False
        return True

    def wake(self, act: Callable[[list["Stream"]], None]) -> None:
        """Has the loop wake the readers, and then do something with the streams that are over,
        unless that is on its way.
        """
        with self.lock:
            if self._is_called:
                return
            self._is_called = self.call(lambda: self._wake_now(act))

    def _wake_now(self, act: Callable[[list["Stream"]], None]) -> None:
        with self.lock:
            streams, self._to_wake = self._to_wake, []
            self._is_called = False
            for stream in streams:
                stream.is_noted = False
        for stream in streams:
            stream.wake()
        act([stream for stream in streams if stream.is_over])


class Stream:
    """The outputs of one request, for one reader."""

    def __init__(self, handover: Handover, request_id: str, n: int, prompt_tokens: int):
        self.request_id, self.n, self.is_noted = request_id, n, False
        self._handover, self._prompt_tokens = handover, prompt_tokens
        self._news: dict[int, News] = {}
        self._open = self._left = n  # sequences whose end is not written, and not read
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    # ---- the writer's side; the handover's lock is held

    def news(self, index: int, request: Request | None, num_top: int | None) -> News:
        """Where what is new of a sequence is added."""
        news = self._news.get(index)
        if news is None:
            news = self._news[index] = News(request, TokenRun(num_top))
        self._handover.note(self)
        return news

    def finish(self, news: News, end: End) -> None:
        """Adds a sequence's end."""
        news.end = end
        self._open -= 1

    def fail(self, error: Exception) -> None:
        """Ends the stream with an error, behind what is there already."""
        self._error, self._open = error, 0
        self._handover.note(self)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be written."""
        return not self._open

    # ---- the reader's side

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Output:
        while True:
            with self._handover.lock:
                index = next(iter(self._news), None)
                news = None if index is None else self._news.pop(index)
            if index is not None and news is not None:
                return self._output(index, news)
            if not self._left:
                raise StopAsyncIteration
            if self._error is not None:
                self._left = 0
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def wake(self) -> None:
        """Lets the reader look again."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _output(self, index: int, news: News) -> Output:
        end, request = news.end, news.request
        cached = 0 if request is None else request.cached_tokens or 0
        if end is None:
            return Output(
                index=index,
                token_ids=news.run.ids,
                prompt_tokens=self._prompt_tokens,
                cached_tokens=cached,
                logprobs=news.run.logprobs(),
                prompt_logprobs=news.prompt_logprobs,
            )
        self._left -= 1
        return Output(
            index=index,
            token_ids=news.run.ids,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=cached,
            logprobs=news.run.logprobs(),
            prompt_logprobs=news.prompt_logprobs,
            finish_reason=end.reason,
            matched_stop=end.matched_stop,
            draft_tokens=0 if request is None else request.draft_tokens,
            accepted_tokens=0 if request is None else request.accepted_tokens,
            error=end.error,
        )
