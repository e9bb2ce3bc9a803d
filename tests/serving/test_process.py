"""The parts of a serving process: its life, its log, and what it tells while it starts."""

import asyncio
import io
import json
import logging
import os
import signal
from dataclasses import replace

import grpc
import pytest
from rich.console import Console
from smg_grpc_proto.generated import vllm_engine_pb2 as messages

from configs.monitoring import MonitoringConfig
from serving import logs
from serving.command.progress import StartProgress
from serving.lifetime import EndedEarlyError, Lifetime
from serving.starting_engine import StartingEngine
from serving.statistics import SequenceRecord, Statistics
from serving.stats_log import RequestLog, StatsLog, line
from tests.serving.servers import INFO, FakeEngine, connected, run, soon, status
from tests.serving.test_metrics import ENDED


class Part:
    """Notes what is done to it."""

    def __init__(self, name: str, notes: list[str], *, fault: str = "", drains_s: float = 0.0):
        self.name, self.notes, self.fault, self.drains_s = name, notes, fault, drains_s

    async def start(self) -> str:
        self.notes.append(f"start {self.name}")
        if self.fault:
            raise ValueError(self.fault)
        return self.name

    async def drain(self, hurry: asyncio.Event | None = None) -> None:
        self.notes.append(f"drain {self.name}")
        waiting = asyncio.sleep(self.drains_s)
        if hurry is not None:
            try:
                await asyncio.wait_for(hurry.wait(), self.drains_s)
            except TimeoutError:
                self.notes.append(f"drained {self.name}")
        waiting.close()

    async def stop(self) -> None:
        self.notes.append(f"stop {self.name}")


def test_parts_start_in_order_drain_together_and_stop_in_reverse():
    notes: list[str] = []

    async def test():
        async with Lifetime() as life:
            assert await life.start(Part("a", notes)) == "a"
            await life.start(Part("b", notes))
            os.kill(os.getpid(), signal.SIGTERM)
            await life.ended()
        assert life.fault == ""

    run(test)
    both = ["drain a", "drain b", "drained a", "drained b"]
    assert notes == ["start a", "start b", *both, "stop b", "stop a"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_part_that_cannot_start_stops_the_others_without_draining():
    notes: list[str] = []

    async def test():
        with pytest.raises(ValueError, match="taken"):
            async with Lifetime() as life:
                await life.start(Part("a", notes))
                await life.start(Part("b", notes, fault="taken"))

    run(test)
    assert notes == ["start a", "start b", "stop b", "stop a"]


def test_a_signal_during_the_start_ends_it_at_once():
    async def test():
        with pytest.raises(EndedEarlyError):
            async with Lifetime() as life:
                asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), signal.SIGINT)
                await life.unless_ended(asyncio.sleep(60))

    run(test)


def test_a_second_signal_hurries_and_a_fault_ends_it_too():
    notes: list[str] = []

    async def test():
        async with Lifetime() as life:
            await life.start(Part("a", notes, drains_s=60))
            life.end("the device is gone")
            life.end("and more")
            await life.ended()
            asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), signal.SIGTERM)
        assert life.fault == "the device is gone"

    run(test)
    assert "drained a" not in notes


def test_a_server_that_starts_says_how_far_it_is_and_then_serves():
    """F196."""

    async def test():
        engine = StartingEngine()
        engine.say("compiling 8 programs: 3/8")
        async with connected(engine) as it:
            health = await it.stub.HealthCheck(messages.HealthCheckRequest())
            assert (health.healthy, health.message) == (False, "compiling 8 programs: 3/8")
            code, text = await status(it.stub.GetModelInfo(messages.GetModelInfoRequest()))
            assert code == grpc.StatusCode.UNAVAILABLE
            assert text == "not ready: compiling 8 programs: 3/8"
            call = it.stub.Generate(messages.GenerateRequest(text="hi"))
            assert (await status(call.read()))[0] != grpc.StatusCode.OK
            engine.become(FakeEngine())
            assert (await it.stub.HealthCheck(messages.HealthCheckRequest())).healthy
            answers = await it.generate(max_tokens=3)
            assert answers[-1].complete.finish_reason == "length"
            info = await it.stub.GetModelInfo(messages.GetModelInfoRequest())
            assert info.vocab_size == INFO.vocab_size

    run(test)


@pytest.fixture
def clean_logging():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_logs_are_one_object_a_line_with_the_fields_of_a_record(clean_logging, capsys):
    logs.set_up(MonitoringConfig(log_format="json"))
    logging.getLogger("a").info("one %s", "x\ny", extra={"fields": {"n": 2}})
    logging.getLogger("a").debug("not asked for")
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("b").exception("fault")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["level"], first["logger"], first["message"], first["n"]) == (
        *("info", "a", "one x\ny"),
        2,
    )
    assert "ValueError: bad" in second["exception"] and second["level"] == "error"


def test_text_logs_have_level_and_name(clean_logging, capsys):
    logs.set_up(MonitoringConfig(log_level="warning"))
    logging.getLogger("a").info("no")
    logging.getLogger("a").warning("yes")
    [only] = capsys.readouterr().err.splitlines()
    assert only.endswith("WARNING a: yes")


def test_a_line_of_statistics_tells_rates_and_what_is_held():
    before = Statistics(prompt_tokens=100, generation_tokens=10, prefix_queries=100, prefix_hits=0)
    now = replace(before, prompt_tokens=300, generation_tokens=60, running=3, waiting=1)
    now = replace(now, cache_usage=0.5, prefix_queries=300, prefix_hits=150)
    assert line(before, now, 10.0) == (
        "prompt 20.0 tokens/s, generation 5.0 tokens/s, running 3, waiting 1, cache 50.0%, "
        "prefix hits 75.0%"
    )
    drafted = replace(now, draft_tokens=70, accepted_tokens=35, preemptions=2)
    assert line(now, drafted, 1.0).endswith("drafts accepted 50.0%, preemptions 2")


def test_statistics_are_logged_while_there_is_something_to_tell_and_once_more(caplog):
    caplog.set_level(logging.INFO)

    class Counted:
        statistics = Statistics()

    async def test():
        log = StatsLog(Counted(), every_s=0.01)
        await log.start()
        await asyncio.sleep(0.05)
        assert not caplog.records
        Counted.statistics.running = 1
        await soon(lambda: len(caplog.records) > 1)
        Counted.statistics.running = 0
        await asyncio.sleep(0.05)
        count = len(caplog.records)
        await asyncio.sleep(0.05)
        assert len(caplog.records) == count
        await log.stop()

    run(test)


def test_a_request_is_logged_with_all_that_is_known_of_it(caplog):
    caplog.set_level(logging.INFO)
    RequestLog().on_finished(ENDED)
    [record] = caplog.records
    text = "r[0] stop: 12 prompt tokens (4 cached), 5 generated, 3.250 s"
    assert record.getMessage() == text
    assert record.fields["first_token"] == 101.0 and isinstance(ENDED, SequenceRecord)


def test_progress_is_lines_where_there_is_no_terminal_and_what_probes_hear(caplog):
    caplog.set_level(logging.INFO)
    said: list[str] = []
    with StartProgress(Console(file=io.StringIO()), said.append) as progress:
        progress.loading("layers.0", 2_000_000_000)
        progress.loading("layers.1", 1_000_000_000)
        progress.compiling("prefill of 64 tokens", 0, 8)
        progress.compiling("decode of 4 rows", 7, 8)
    assert [r.getMessage() for r in caplog.records] == ["loading weights", "compiling 8 programs"]
    assert said == [
        "loading weights: 2.00 GB",
        "loading weights: 3.00 GB",
        "compiling 8 programs: 0/8",
        "compiling 8 programs: 7/8",
    ]


def test_progress_is_bars_with_names_in_a_terminal():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with StartProgress(console, lambda text: None) as progress:
        progress.loading("layers.0", 1)
        progress.compiling("decode of 4 rows", 7, 8)
    assert "decode of 4 rows" in out.getvalue() and "7/8" in out.getvalue()
