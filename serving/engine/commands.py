"""What the event loop asks of the engine's thread. Each request is carried out or refused."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

from serving.engine_api import EngineBusyError

T = TypeVar("T")


class Command(Protocol):
    """Something for the engine's thread to do between two steps."""

    def run(self) -> None:
        """Does it, on that thread."""
        ...

    def refuse(self, error: Exception) -> None:
        """Says that it will not be done any more."""
        ...


@dataclass(frozen=True)
class Call(Generic[T]):
    """A call whose result, or whose ValueError or EngineBusyError, someone waits for."""

    act: Callable[[], T]
    future: Future[T] = field(default_factory=Future)

    def run(self) -> None:
        """Calls, and tells the result."""
        try:
            result = self.act()
        except (ValueError, EngineBusyError) as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def refuse(self, error: Exception) -> None:
        """Fails the call."""
        if not self.future.done():
            self.future.set_exception(error)


class Commands:
    """A line of commands; the thread that carries them out may sleep until one comes."""

    def __init__(self) -> None:
        self._line: SimpleQueue[Command] = SimpleQueue()
        self._running: Command | None = None

    def put(self, command: Command) -> None:
        """Adds a command."""
        self._line.put(command)

    def run_all(self, *, sleep: bool) -> None:
        """Carries out what is there, after waiting for a first one if it may sleep."""
        if sleep:
            self._run(self._line.get())
        while True:
            try:
                command = self._line.get_nowait()
            except Empty:
                return
            self._run(command)

    def refuse_all(self, error: Exception) -> None:
        """Refuses what is there, and what was being carried out when the thread came to its end."""
        if self._running is not None:
            self._running.refuse(error)
        while True:
            try:
                self._line.get_nowait().refuse(error)
            except Empty:
                return

    def _run(self, command: Command) -> None:
        self._running = command
        command.run()
        self._running = None
