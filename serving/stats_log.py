"""A line of statistics every few seconds while there is something to tell, and a line a request."""

import asyncio
import logging
import time
from dataclasses import asdict, replace
from typing import Protocol

from serving.statistics import SequenceRecord, Statistics, StepRecord

LOG = logging.getLogger(__name__)
EVERY_S = 10.0


class Counted(Protocol):
    """What is read of an engine."""

    @property
    def statistics(self) -> Statistics: ...


class StatsLog:
    """A part of the process: starts, drains and stops with the others."""

    def __init__(self, engine: Counted, *, every_s: float = EVERY_S):
        self._engine, self._every_s = engine, every_s
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to look."""
        self._task = asyncio.create_task(self._run())

    async def drain(self, hurry: asyncio.Event | None = None) -> None:
        """Goes on."""

    async def stop(self) -> None:
        """Ends."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        before, since = replace(self._engine.statistics), time.monotonic()
        was_busy = False
        while True:
            await asyncio.sleep(self._every_s)
            now, at = replace(self._engine.statistics), time.monotonic()
            is_busy = bool(now.running or now.waiting) or now.steps != before.steps
            if is_busy or was_busy:
                LOG.info("%s", line(before, now, at - since))
            before, since, was_busy = now, at, is_busy


def line(before: Statistics, now: Statistics, seconds: float) -> str:
    """What happened between two looks, and what is held at the second."""
    prompt = (now.prompt_tokens - before.prompt_tokens) / seconds
    generated = (now.generation_tokens - before.generation_tokens) / seconds
    parts = [
        f"prompt {prompt:.1f} tokens/s",
        f"generation {generated:.1f} tokens/s",
        f"running {now.running}",
        f"waiting {now.waiting}",
        f"cache {now.cache_usage:.1%}",
    ]
    if looked_up := now.prefix_queries - before.prefix_queries:
        parts.append(f"prefix hits {(now.prefix_hits - before.prefix_hits) / looked_up:.1%}")
    if tested := now.draft_tokens - before.draft_tokens:
        parts.append(
            f"drafts accepted {(now.accepted_tokens - before.accepted_tokens) / tested:.1%}"
        )
    if preempted := now.preemptions - before.preemptions:
        parts.append(f"preemptions {preempted}")
    return ", ".join(parts)


class RequestLog:
    """A listener that logs each sequence's end."""

    def on_step(self, step: StepRecord) -> None:
        """Steps are not logged."""

    def on_finished(self, sequence: SequenceRecord) -> None:
        """One line, with all of the record in the JSON format."""
        LOG.info(
            "%s[%d] %s: %d prompt tokens (%d cached), %d generated, %.3f s",
            sequence.request_id,
            sequence.index,
            sequence.reason,
            sequence.prompt_tokens,
            sequence.cached_tokens,
            sequence.generation_tokens,
            sequence.e2e_s,
            extra={"fields": asdict(sequence)},
        )
