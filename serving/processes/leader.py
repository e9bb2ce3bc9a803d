"""Process 0's side: tells the others what to run, and hears when one of them is gone."""

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from queue import SimpleQueue
from typing import Any

from serving.engine_api import Profile
from serving.processes import adapter_arrays, program_run
from serving.processes.link import Kind, Link, LostError

END_S = 10.0  # for the others to end after they were told
LOSS_S = 2.0  # between what devices notice of a process's end and what its connection does


class Leader:
    """`device_api.Others` over connections. Two callbacks, from threads of its own: `on_lost` with
    a sentence when a process is gone too early, `on_drain` when one was asked to end.
    """

    def __init__(self, links: Mapping[int, Link]):
        self._links = links
        self._facts: dict[int, SimpleQueue[dict[str, Any] | str]] = {
            index: SimpleQueue() for index in links
        }
        self._is_ending = False
        self._loss, self._has_lost = "", threading.Event()
        self.on_lost: Callable[[str], object] = lambda sentence: None
        self.on_drain: Callable[[], object] = lambda: None
        self._threads = [
            threading.Thread(target=self._read, args=one, name=f"process {one[0]}", daemon=True)
            for one in links.items()
        ]
        for thread in self._threads:
            thread.start()

    # ---- while they start

    def agree(self, flags: Mapping[str, str], num_blocks: int) -> int:
        """The blocks that all processes have room for; waits for them. Raises ValueError with a
        sentence when one is gone, or was started with other flags.
        """
        blocks = [num_blocks]
        for index in self._links:
            told = self._told_by(index)
            for name, value in flags.items():
                if told["flags"][name] != value:
                    raise ValueError(
                        f"process {index} was started with {name} {told['flags'][name]}, and "
                        f"process 0 with {value}"
                    )
            blocks.append(told["num_blocks"])
        self._send(Kind.FACTS, json.dumps({"num_blocks": min(blocks)}).encode())
        return min(blocks)

    def await_ready(self) -> None:
        """Waits until the others have compiled all programs. ValueError when one is gone."""
        for index in self._links:
            self._told_by(index)

    # ---- device_api.Others

    def run(self, name: str, adapter: str | None, host: tuple[Any, ...], times: int) -> None:
        """Has a program run."""
        self._send(Kind.RUN, program_run.encoded(name, adapter, host, times))

    def update(self, adapters: Mapping[str, Any]) -> None:
        """Sends adapters."""
        self._send(Kind.ADAPTERS, adapter_arrays.encoded(adapters))

    def start_profile(self, profile: Profile) -> None:
        """Has them profile, each into a folder of its own in that of process 0."""
        for index, link in self._links.items():
            own = replace(profile, folder=f"{profile.folder}/process-{index}")
            link.send(Kind.PROFILE, json.dumps(asdict(own)).encode())

    def stop_profile(self) -> None:
        """Has them end it."""
        self._send(Kind.PROFILE_END)

    # ---- the end

    def loss(self) -> str:
        """The sentence about a process that is gone, if that is why something failed here: devices
        may notice sooner, and say less. Waits a little for it.
        """
        self._has_lost.wait(LOSS_S)
        return self._loss

    def end(self) -> None:
        """Has them end, and waits for that; those that are gone already are not missed."""
        self._is_ending = True
        for link in self._links.values():
            try:
                link.send(Kind.END)
            except LostError:
                continue
        for thread in self._threads:
            thread.join(END_S)

    def _send(self, kind: Kind, body: bytes = b"") -> None:
        for link in self._links.values():
            link.send(kind, body)

    def _told_by(self, index: int) -> dict[str, Any]:
        told = self._facts[index].get()
        if isinstance(told, str):
            raise ValueError(told)
        return told

    def _read(self, index: int, link: Link) -> None:
        sentence = f"{link.name} has ended"
        while True:
            try:
                kind, body = link.receive()
            except LostError:
                break
            if kind == Kind.FACTS:
                self._facts[index].put(json.loads(bytes(body)))
            elif kind == Kind.DRAIN:
                self.on_drain()
            elif kind == Kind.FAULT:
                sentence = f"{link.name} has ended: {bytes(body).decode()}"
        link.close()
        if not self._is_ending:
            self._loss = self._loss or sentence
            self._has_lost.set()
            self._facts[index].put(sentence)
            self.on_lost(sentence)
