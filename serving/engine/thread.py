"""The thread that an engine's steps run in, and what becomes of everyone who waits when it ends."""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import TypeVar

from serving.engine.commands import Call, Command
from serving.engine.step_loop import StepLoop
from serving.engine.streams import Handover
from serving.engine_api import EngineError

LOG = logging.getLogger(__name__)
MAX_TEXT = 300  # characters of an error that clients get
T = TypeVar("T")


class EngineThread:
    """Runs the steps until it is told to end, or something fails."""

    def __init__(self, steps: StepLoop, handover: Handover, is_over: Callable[[EngineError], None]):
        """`is_over` is called once, on the event loop, with what all later calls are refused by."""
        self._steps, self._handover, self._tell_over = steps, handover, is_over
        self._error: EngineError | None = None
        self._is_given_up = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises EngineError when it has ended."""
        if self._error is not None:
            raise self._error

    def put(self, command: Command) -> None:
        """Has a command carried out between two steps."""
        self._steps.commands.put(command)

    async def call(self, act: Callable[[], T]) -> T:
        """What a call on the thread gives, between two steps."""
        self.check()
        self._handover.bind()
        call = Call(act)
        self.put(call)
        return await asyncio.wrap_future(call.future)

    def end(self) -> None:
        """Aborts what runs, and waits for the thread's end, unless it was given up."""
        self.put(Call(self._steps.end))
        if not self._is_given_up:
            self._thread.join()

    def give_up(self, sentence: str) -> None:
        """Refuses everything from now on, without the thread: its step may never end. Called on
        the event loop.
        """
        self._is_given_up = True
        self._over(EngineError(sentence))

    def _run(self) -> None:
        fault = Fault(is_told=lambda: self._is_given_up)
        with fault:
            self._steps.run()
        over = partial(self._over, EngineError(fault.sentence or "the engine is closed"))
        if not self._handover.call(over):
            over()

    def _over(self, error: EngineError) -> None:
        if self._error is not None:
            return
        self._error = error
        self._steps.weights.refuse(error)
        self._steps.commands.refuse_all(error)
        self._tell_over(error)


class Fault(AbstractContextManager["Fault"]):
    """Takes whatever ends the thread too early, so that those who wait for it can be told. Where
    `is_told` the cause is known already, and this is what came of it.
    """

    def __init__(self, is_told: Callable[[], bool] = lambda: False) -> None:
        self._is_told, self.sentence = is_told, ""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is not None:
            level = logging.DEBUG if self._is_told() else logging.ERROR
            LOG.log(level, "the engine has failed", exc_info=error)
            text = " ".join(str(error).split()) or type(error).__name__
            self.sentence = f"the engine has failed: {text[:MAX_TEXT]}"
        return True
