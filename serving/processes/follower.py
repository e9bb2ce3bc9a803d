"""Another process's side: runs what process 0 tells it, until that says it is over or is gone."""

import json
import logging
import threading
from collections.abc import Callable, Mapping

from serving.device.model_device import ModelDevice
from serving.device.programs import Call
from serving.engine.thread import Fault
from serving.engine_api import Profile
from serving.processes import adapter_arrays, program_run
from serving.processes.link import Kind, Link, LostError

LOG = logging.getLogger(__name__)
ENDED_EARLY = 130


class Follower:
    """A thread reads and runs, so that it hears of an end while the process still starts; then,
    and when process 0 is gone, it calls `leave` with an exit code, which ends the process.
    """

    def __init__(self, link: Link, leave: Callable[[int], None]):
        self._link, self._leave = link, leave
        self._agreed: dict[str, int] = {}
        self._has_agreed = threading.Event()
        self._device: ModelDevice | None = None
        self._calls: Mapping[str, Call] = {}
        self._thread = threading.Thread(target=self._work, name="follower", daemon=True)
        self._thread.start()

    def agree(self, flags: Mapping[str, str], num_blocks: int) -> int:
        """The blocks that all processes have room for, after process 0 has heard of this one's."""
        facts = {"flags": dict(flags), "num_blocks": num_blocks}
        self._link.send(Kind.FACTS, json.dumps(facts).encode())
        self._has_agreed.wait()
        return self._agreed["num_blocks"]

    def follow(self, device: ModelDevice) -> None:
        """Says that this process is ready, and returns when process 0 says that all is over."""
        self._device, self._calls = device, device.calls()
        self._link.send(Kind.FACTS, b"{}")
        self._thread.join()
        self._link.close()

    def ask_for_end(self) -> None:
        """Tells process 0 that this one was asked to end."""
        self._link.send(Kind.DRAIN)

    def _work(self) -> None:
        fault, is_over = Fault(), False
        with fault:
            is_over = self._read()
        if fault.sentence:
            self.complain(fault.sentence)
        if not is_over:
            self._leave(1)
        elif self._device is None:
            self._leave(ENDED_EARLY)

    def complain(self, sentence: str) -> None:
        """Tells process 0 why this one will end."""
        try:
            self._link.send(Kind.FAULT, sentence.encode())
        except LostError as error:
            LOG.error("%s", error)

    def _read(self) -> bool:
        """Does what it is told until the end; False when process 0 is gone without one."""
        while True:
            try:
                kind, body = self._link.receive()
            except LostError as error:
                LOG.error("%s, so this process ends", error)
                return False
            if kind == Kind.END:
                return True
            if kind == Kind.FACTS:
                self._agreed = json.loads(bytes(body))
                self._has_agreed.set()
            else:
                self._do(kind, body)

    def _do(self, kind: Kind, body: memoryview) -> None:
        device = self._device
        assert device is not None, "process 0 runs steps before all are ready"
        if kind == Kind.RUN:
            device.run(*program_run.decoded(body, self._calls))
        elif kind == Kind.ADAPTERS:
            device.update(adapters=adapter_arrays.decoded(body))
        elif kind == Kind.PROFILE:
            device.start_profile(Profile(**json.loads(bytes(body))))
        elif kind == Kind.PROFILE_END:
            device.stop_profile()
        else:
            raise ValueError(f"process 0 sends {kind.name}, which only the others may")
