"""Requests on their way from the event loop to the scheduler, and who is answered."""

import time
from collections.abc import Sequence as Items
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from serving.engine.commands import Call
from serving.engine.grammar_rows import GrammarDesk
from serving.engine.sequence import Sequence
from serving.engine.step_loop import StepLoop
from serving.engine.stops import StopWatch, StopWatches
from serving.engine.streams import End, Handover, Stream
from serving.engine_api import EngineError
from serving.grammar.matcher import GrammarMatcher
from serving.scheduling.intake import QueueFullError
from serving.scheduling.request import Asked, Request


@dataclass(frozen=True, kw_only=True)
class Readers:
    """What reads the text of sequences: nothing, for a model without a tokenizer."""

    stops: StopWatches | None = None
    grammars: GrammarDesk | None = None

    def check(self, asked: Asked) -> None:
        """Raises ValueError for what cannot be done without a tokenizer."""
        sampling = asked.sampling
        wanted = {
            "stop": sampling.stop,
            "bad_words": sampling.bad_words,
            "structured_outputs": sampling.structured_outputs,
        }
        for name, value in wanted.items():
            if value and self.stops is None:
                raise ValueError(f"{name} needs a tokenizer, and this model has none")

    def watch(self, asked: Asked) -> StopWatch | None:
        """What looks for the stop strings of one sequence."""
        if not asked.sampling.stop:
            return None
        assert self.stops is not None
        return self.stops.watch(asked.sampling)


@dataclass(kw_only=True)
class Arrival:
    """The command that enters a request, with the matchers of its sequences if it has a grammar."""

    asked: Asked
    stream: Stream
    matchers: Items[GrammarMatcher] = ()
    time: float = field(default_factory=time.monotonic)
    loop: StepLoop
    readers: Readers
    handover: Handover

    def run(self) -> None:
        """Puts it in the line, or fails its stream with what the scheduler has against it."""
        try:
            requests = self.loop.scheduler.add(self.asked)
        except (ValueError, QueueFullError) as error:
            self.refuse(error)
            return
        for request in requests:
            self.loop.ledger.add(self._sequence(request))

    def refuse(self, error: Exception) -> None:
        """Fails its stream."""
        with self.handover.lock:
            self.stream.fail(error)

    def _sequence(self, request: Request) -> Sequence:
        grammars, row = self.readers.grammars, None
        if self.matchers:
            assert grammars is not None
            row = grammars.row(self.matchers[request.index], request)
        return Sequence(
            request,
            self.stream.boxes[request.index],
            arrival=self.time,
            stops=self.readers.watch(self.asked),
            grammar=row,
        )


class Requests:
    """The requests that are not over, on the event loop."""

    def __init__(self, loop: StepLoop, handover: Handover, readers: Readers):
        self._loop, self._handover, self._readers = loop, handover, readers
        self._streams: dict[str, Stream] = {}
        self._compiling: dict[Stream, Future[list[GrammarMatcher]]] = {}

    def check(self, asked: Asked) -> None:
        """Raises ValueError for what cannot be done."""
        self._readers.check(asked)

    def enter(self, asked: Asked) -> Stream:
        """Sends a request to the scheduler, by way of its grammar's compilation if it has one.
        Raises ValueError for an id that is here.
        """
        known = self._streams.get(asked.request_id)
        if known is not None and not known.is_over:
            raise ValueError(f"request {asked.request_id!r} is here already")
        stream = Stream(self._handover, asked.request_id, len(asked.prompt))
        stream.open(asked.sampling.n, asked.sampling.logprobs)
        arrival = Arrival(
            asked=asked,
            stream=stream,
            loop=self._loop,
            readers=self._readers,
            handover=self._handover,
        )
        if asked.sampling.structured_outputs is None:
            self._loop.commands.put(arrival)
        else:
            self._compile(arrival)
        self._streams[asked.request_id] = stream
        return stream

    def abort(self, request_id: str) -> None:
        """Ends a request, wherever it is."""
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return
        compiling = self._compiling.pop(stream, None)
        if compiling is None:
            self._loop.commands.put(Call(partial(self._loop.abort, request_id)))
            return
        compiling.cancel()
        with self._handover.lock:
            for box in stream.boxes:
                box.finish(End("abort"))
        self.forget(self._handover.deliver())

    def forget(self, over: Items[Stream]) -> None:
        """Lets go of the streams that are over."""
        for stream in over:
            if self._streams.get(stream.request_id) is stream:
                del self._streams[stream.request_id]

    def refuse_all(self, error: EngineError) -> None:
        """Fails what is not over."""
        for future in self._compiling.values():
            future.cancel()
        self._compiling.clear()
        for stream in list(self._streams.values()):
            self._fail(stream, error)
        self._streams.clear()

    def close(self) -> None:
        """Ends the threads."""
        if self._readers.grammars is not None:
            self._readers.grammars.close()

    def _compile(self, arrival: Arrival) -> None:
        grammars = self._readers.grammars
        assert grammars is not None
        future = grammars.compile(arrival.asked)
        self._compiling[arrival.stream] = future
        future.add_done_callback(lambda _: self._handover.call(partial(self._compiled, arrival)))

    def _compiled(self, arrival: Arrival) -> None:
        future = self._compiling.pop(arrival.stream, None)
        if future is None:  # it was aborted meanwhile
            return
        error = future.exception()
        if error is None:
            arrival.matchers = future.result()
            self._loop.commands.put(arrival)
            return
        del self._streams[arrival.asked.request_id]
        sentence = f"the grammar could not be compiled: {error}"
        self._fail(
            arrival.stream, error if isinstance(error, ValueError) else EngineError(sentence)
        )

    def _fail(self, stream: Stream, error: Exception) -> None:
        with self._handover.lock:
            if not stream.is_over:
                stream.fail(error)
        self.forget(self._handover.deliver())
