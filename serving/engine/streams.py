"""From the engine's thread to the readers on its event loop.

The thread merges what is new of a sequence into what its reader has not taken yet, so a reader that
never comes costs one output of each sequence, not a queue of them; and it calls the loop at most
once before the loop has looked. Which sequences have something new is one list for all of them:
the loop hands them to their streams and wakes readers, so that this costs the thread one entry.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from serving.engine.token_run import TokenRun
from serving.engine_api import EngineError, Logprobs, Output
from serving.scheduling.request import FinishReason, Request


class End(NamedTuple):
    """Why a sequence has ended; the fields of an output."""

    reason: FinishReason
    matched_stop: int | str | None = None
    error: str = ""
    experts: np.ndarray | None = None


class Box:
    """What is new of one sequence since its reader took the last; the handover's lock guards it.
    `is_new`: it is among the handover's `news` or its stream's `changed`.
    """

    __slots__ = ("end", "index", "is_new", "prompt_logprobs", "request", "run", "stream")

    def __init__(self, stream: "Stream", index: int, num_top: int | None):
        self.stream, self.index = stream, index
        self.request: Request | None = None
        self.run, self.is_new = TokenRun(num_top), False
        self.prompt_logprobs: Logprobs | None = None
        self.end: End | None = None

    def mark(self) -> None:
        """Lets the reader know, after something was added to a box that was not new."""
        self.is_new = True
        self.stream.handover.news.append(self)

    def finish(self, end: End) -> None:
        """Adds the sequence's end."""
        self.end = end
        self.stream.close_one()
        if not self.is_new:
            self.mark()

    def take(self) -> Output:
        """All that is new, as one output."""
        run, scores, end, request = self.run, self.prompt_logprobs, self.end, self.request
        self.run, self.prompt_logprobs, self.is_new = TokenRun(run.num_top), None, False
        cached = 0 if request is None else request.cached_tokens or 0
        if end is None:
            return Output(
                index=self.index,
                token_ids=run.ids,
                prompt_tokens=self.stream.prompt_tokens,
                cached_tokens=cached,
                logprobs=run.logprobs(),
                prompt_logprobs=scores,
            )
        return Output(
            index=self.index,
            token_ids=run.ids,
            prompt_tokens=self.stream.prompt_tokens,
            cached_tokens=cached,
            logprobs=run.logprobs(),
            prompt_logprobs=scores,
            finish_reason=end.reason,
            matched_stop=end.matched_stop,
            draft_tokens=0 if request is None else request.draft_tokens,
            accepted_tokens=0 if request is None else request.accepted_tokens,
            error=end.error,
            experts=end.experts,
        )


class Handover:
    """What all streams of an engine share: the lock, the loop, and whom to wake."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.news: list[Box] = []  # that have something new
        self.over: list[Stream] = []  # to which nothing more will be written
        self._loop: asyncio.AbstractEventLoop | None = None
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

    def wake(self, act: Callable[[list["Stream"]], None], *, always: bool) -> None:
        """Has the loop deliver, and then do something with the streams that are over; unless that
        is on its way, or there is nothing and it is not always to be done.
        """
        with self.lock:
            if self._is_called or not (self.news or self.over or always):
                return
            self._is_called = self.call(lambda: act(self.deliver()))

    def deliver(self) -> list["Stream"]:
        """Hands what is new to the streams and wakes their readers, on the loop; the streams that
        are over.
        """
        with self.lock:
            news, self.news = self.news, []
            over, self.over = self.over, []
            self._is_called = False
        for box in news:
            stream = box.stream
            stream.changed.append(box)
            if stream.reader is not None:
                stream.wake()
        for stream in over:
            stream.is_closed = True
            stream.wake()
        return over


class Stream:
    """The outputs of one request, for one reader."""

    def __init__(self, handover: Handover, request_id: str, prompt_tokens: int):
        self.request_id, self.prompt_tokens = request_id, prompt_tokens
        self.handover = handover
        self.boxes: list[Box] = []
        self.changed: deque[Box] = deque()  # the loop's alone, as `reader`, which waits
        self.reader: asyncio.Future[None] | None = None
        self.is_closed = False  # all that is written has been delivered
        self.num_open = self._left = 0  # sequences whose end is not written, and not read
        self._error: Exception | None = None

    def open(self, n: int, num_top: int | None) -> None:
        """Makes a box for each sequence; before anything else."""
        self.boxes = [Box(self, index, num_top) for index in range(n)]
        self.num_open = self._left = n

    # ---- the writer's side; the handover's lock is held

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be written."""
        return not self.num_open

    def close_one(self) -> None:
        """Counts the end of a sequence."""
        self.num_open -= 1
        if not self.num_open:
            self.handover.over.append(self)

    def fail(self, error: Exception) -> None:
        """Ends the stream with an error, behind what is there already."""
        self._error, self.num_open = error, 0
        self.handover.over.append(self)

    # ---- the reader's side

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Output:
        while not self.changed and self._left and not self.is_closed:
            self.reader = asyncio.get_running_loop().create_future()
            await self.reader
        if self.changed:
            with self.handover.lock:
                output = self.changed.popleft().take()
            self._left -= output.finish_reason is not None
            return output
        if self._left and self._error is not None:
            self._left = 0
            raise self._error
        raise StopAsyncIteration

    def wake(self) -> None:
        """Lets the reader look again."""
        reader, self.reader = self.reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)
