"""The engine over a fake device: outputs, ends, aborts, and what a slow reader costs."""

import asyncio

import pytest

from serving.engine_api import EngineError
from serving.scheduling.intake import QueueFullError
from tests.serving.engines import alone, collect, entries, run, running
from tests.serving.servers import soon

MODES = pytest.mark.parametrize(
    "config",
    [
        {"async_scheduling": False},
        {"async_scheduling": True},
        {"num_scheduler_steps": 4},
        {"num_speculative_tokens": 3},
    ],
    ids=["one", "two in flight", "many steps", "drafts"],
)


@MODES
def test_requests_together_give_what_each_gives_alone(config):
    async def test():
        async with running(**config) as it:
            asks = [([i % 7] * (3 + 5 * i), {"max_tokens": 1 + i, "seed": i}) for i in range(20)]
            streams = [it.submit(f"r{i}", p, **more) for i, (p, more) in enumerate(asks)]
            outputs = await asyncio.gather(*map(collect, streams))
            await it.idle()
            for (prompt, more), (whole,) in zip(asks, outputs, strict=True):
                assert whole.tokens == alone(prompt, **more)
                assert (whole.reason, whole.end.prompt_tokens) == ("length", len(prompt))

    run(test)


@MODES
def test_f105_a_stop_token_ends_a_sequence_and_only_an_asked_one_is_told(config):
    async def test():
        async with running(**config) as it:
            whole = alone(5, max_tokens=30)
            (eos,) = await it.run("eos", 5, max_tokens=30, more={"eos_token_ids": (whole[4],)})
            (own,) = await it.run("own", 5, max_tokens=30, stop_token_ids=(whole[4],))
            place = whole.index(whole[4]) + 1
            assert eos.tokens == own.tokens == whole[:place]
            assert (eos.reason, eos.end.matched_stop) == ("stop", None)
            assert (own.reason, own.end.matched_stop) == ("stop", whole[4])

    run(test)


def test_f115_sequences_of_one_request_share_their_prompt_and_end_on_their_own():
    async def test():
        async with running() as it:
            wholes = await it.run("r", 40, n=3, max_tokens=6, seed=7)
            await it.idle()
            assert [one.tokens for one in wholes] == [
                alone(40, index=i, n=3, max_tokens=6, seed=7) for i in range(3)
            ]
            assert [one.end.cached_tokens for one in wholes] == [0, 32, 32]
            assert it.engine.statistics.prompt_tokens == 40

    run(test)


def test_log_probabilities_come_with_their_tokens_and_those_of_the_prompt_once():
    async def test():
        async with running(max_num_batched_tokens=32) as it:
            (whole,) = await it.run("r", 50, max_tokens=5, logprobs=2, prompt_logprobs=1)
            tokens = list(range(50)) + whole.tokens
            expected = [(t, -p / 8, [t, t + 1]) for p, t in enumerate(tokens) if p >= 50]
            assert whole.logprobs() == expected
            given = [part.prompt_logprobs for part in whole.parts]
            assert given[0] is not None and set(given[1:]) <= {None}
            assert entries(given[0])[0] == (0, None, [])
            assert entries(given[0])[1:] == [(p, -p / 8, [p]) for p in range(1, 50)]

    run(test)


def test_a_prompt_alone_is_scored():
    async def test():
        async with running() as it:
            (whole,) = await it.run("r", 20, max_tokens=0, prompt_logprobs=0)
            assert (whole.tokens, whole.reason, len(whole.parts)) == ([], "length", 1)
            assert whole.end.prompt_logprobs is not None

    run(test)


def test_the_totals_of_drafts_come_with_the_end():
    async def test():
        async with running(num_speculative_tokens=3, good_drafts=2) as it:
            (whole,) = await it.run("r", 5, max_tokens=31)
            assert whole.end.accepted_tokens == 20 and whole.end.draft_tokens >= 30
            assert all(part.draft_tokens == 0 for part in whole.parts[:-1])
            statistics = it.engine.statistics
            assert statistics.accepted_at == [10, 10, 0]
            assert statistics.accepted_tokens == 20 and statistics.drafts == 10

    run(test)


def test_a_stream_that_is_not_read_is_one_output():
    async def test():
        async with running() as it:
            stream = it.submit("r", 5, max_tokens=200)
            await it.idle()
            (only,) = [output async for output in stream]
            assert list(only.token_ids) == alone(5, max_tokens=200)
            assert only.finish_reason == "length"

    run(test)


def test_f128_aborted_requests_leave_nothing_at_whatever_stage():
    async def test():
        async with running(num_blocks=40, num_speculative_tokens=3) as it:
            for round_ in range(10):
                streams = [
                    it.submit(f"r{i}", [round_, i] * (1 + 4 * i), max_tokens=60) for i in range(20)
                ]
                for i in range(0, 20, 2):
                    it.engine.abort(f"r{i}")
                await asyncio.sleep(0.002 * round_)
                for i in range(1, 20, 2):
                    it.engine.abort(f"r{i}")
                outputs = await asyncio.gather(*map(collect, streams))
                assert {one.reason for whole in outputs for one in whole} <= {"abort", "length"}
            await it.idle()
            (whole,) = await it.run("after", 5, max_tokens=9)
            assert whole.tokens == alone(5, max_tokens=9)

    run(test)


def test_f130_an_abort_of_nothing_is_nothing_and_an_id_may_come_again():
    async def test():
        async with running(step_s=0.01) as it:
            it.engine.abort("never")
            stream = it.submit("r", 5, max_tokens=400, logprobs=1, prompt_logprobs=1, stop=("x",))
            with pytest.raises(ValueError, match="'r' is here already"):
                it.submit("r", 5)
            it.engine.abort("r")
            it.engine.abort("r")
            (again,) = await it.run("r", 5, max_tokens=3)
            assert again.tokens == alone(5, max_tokens=3)
            (aborted,) = await collect(stream)
            assert aborted.reason == "abort"
            await it.idle()
            assert it.engine.statistics.finished["abort"] == 1

    run(test)


def test_f133_what_can_never_run_is_refused_at_once():
    async def test():
        async with running() as it:
            with pytest.raises(ValueError, match="the prompt has 600 tokens"):
                it.submit("long", [1] * 600)
            with pytest.raises(ValueError, match="no adapter 'poet'; those there are: none"):
                it.submit("adapted", 5, more={"adapter": "poet"})
            with pytest.raises(ValueError, match="logit_bias has more than 3"):
                it.submit("biased", 5, logit_bias=dict.fromkeys(range(4), 1.0))
            await it.idle()

    run(test)


def test_a_model_without_a_tokenizer_reads_no_text():
    async def test():
        async with running(engine={"tokenizer": None}) as it:
            for name, value in {"stop": ("x",), "bad_words": ("x",)}.items():
                with pytest.raises(ValueError, match=f"{name} needs a tokenizer"):
                    it.submit("r", 5, **{name: value})
            assert (await it.run("plain", 5))[0].tokens == alone(5)

    run(test)


def test_more_than_may_wait_are_turned_away():
    async def test():
        async with running(max_waiting_requests=3, max_num_seqs=1) as it:
            it.device.gate.clear()
            first = it.submit("first", 5, max_tokens=50)
            await soon(lambda: it.device.plans)
            streams = [it.submit(f"r{i}", 5) for i in range(4)]
            it.device.gate.set()
            outcomes = await asyncio.gather(*map(collect, streams), return_exceptions=True)
            assert isinstance(outcomes[3], QueueFullError)
            assert "3 requests wait, and at most 3 may" in str(outcomes[3])
            assert all(isinstance(one, list) for one in outcomes[:3])
            await collect(first)
            await it.idle()

    run(test)


def test_f188_nan_logits_end_one_request_and_its_neighbours_go_on():
    async def test():
        async with running(step_s=0.002) as it:
            bad, good = it.submit("bad", 5, max_tokens=50), it.submit("good", 6, max_tokens=50)
            await anext(bad)
            it.device.broken.add("bad")
            (one,), (other,) = await asyncio.gather(collect(bad), collect(good))
            assert one.reason == "error" and "logits are not numbers" in one.end.error
            assert other.tokens == alone(6, max_tokens=50)
            await it.idle()
            assert it.engine.statistics.broken == 1
            assert it.engine.statistics.finished["error"] == 1

    run(test)


def test_a_failing_device_fails_all_requests_and_refuses_later_ones(caplog):
    async def test():
        async with running(step_s=0.001) as it:
            streams = [it.submit(f"r{i}", 5 + i, max_tokens=400) for i in range(12)]
            await anext(streams[0])
            it.device.fault = RuntimeError("the card fell off\nthe bus")
            outcomes = await asyncio.gather(*map(collect, streams), return_exceptions=True)
            assert {str(one) for one in outcomes} == {
                "the engine has failed: the card fell off the bus"
            }
            assert {type(one) for one in outcomes} == {EngineError}
            assert not it.engine.state.is_healthy and "fell off" in it.engine.state.message
            with pytest.raises(EngineError, match="fell off"):
                it.submit("later", 5)
            with pytest.raises(EngineError, match="fell off"):
                await it.engine.flush(0)
            it.engine.abort("r1")

    run(test)
    assert "the engine has failed" in caplog.text


def test_closing_aborts_what_runs_and_refuses_what_comes():
    async def test():
        async with running(step_s=0.001) as it:
            stream = it.submit("r", 5, max_tokens=400)
            await anext(stream)
            await it.engine.close()
            assert (await collect(stream))[0].reason == "abort"
            with pytest.raises(EngineError, match="the engine is closed"):
                it.submit("later", 5)

    run(test)


def test_an_engine_that_is_given_up_waits_for_no_step():
    """As where another process of the mesh is gone: the step that runs may never end."""

    async def test():
        async with running() as it:
            stream = it.submit("r", 5, max_tokens=400)
            await anext(stream)
            it.device.gate.clear()
            it.engine.give_up("process 1 has ended")
            with pytest.raises(EngineError, match="process 1 has ended"):
                await collect(stream)
            with pytest.raises(EngineError, match="process 1 has ended"):
                it.submit("later", 5)
            assert not it.engine.state.is_healthy
            await it.engine.close()  # while the thread is in the step
            it.device.gate.set()
            await asyncio.to_thread(it.engine._thread._thread.join, 60)

    run(test)


def test_an_idle_engine_sleeps():
    async def test():
        async with running() as it:
            await it.run("r", 5)
            await it.idle()
            await asyncio.sleep(0.05)
            look, looks = it.engine._steps.load.look, []
            it.engine._steps.load.look = lambda *a, **k: (looks.append(1), look(*a, **k))
            await asyncio.sleep(0.2)
            assert not looks
            await it.run("s", 5)

    run(test)
