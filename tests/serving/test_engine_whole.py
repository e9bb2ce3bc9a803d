"""The engine as a whole: weights that change, pauses, flushes, profiles, loads, and who is told."""

import asyncio

import pytest

from serving.engine_api import EngineBusyError, EngineError, Profile
from serving.scheduling.kv_events import AllBlocksCleared, BlocksStored
from serving.statistics import SequenceRecord, StepRecord
from tests.serving.engines import alone, collect, run, running
from tests.serving.servers import soon


def test_a_drain_lets_what_has_begun_end_and_then_changes_the_weights():
    async def test():
        async with running(step_s=0.001, max_num_seqs=2) as it:
            old = [it.submit(f"old{i}", 5 + i, max_tokens=60) for i in range(2)]
            new = [it.submit(f"new{i}", 20 + i, max_tokens=6) for i in range(4)]
            await anext(old[0])
            version = await it.engine.update(params="second")
            assert (version, it.device.updates) == (1, ["second"])
            later = it.submit("later", 5, max_tokens=6)
            first = next(iter(await collect(old[1])))
            assert first.tokens == alone(6, max_tokens=60)
            for i, stream in enumerate(new):
                (whole,) = await collect(stream)
                assert whole.tokens == alone(20 + i, max_tokens=6, weights=1)
            assert (await collect(later))[0].tokens == alone(5, max_tokens=6, weights=1)
            await it.idle()
            assert it.engine.statistics.weight_version == 1

    run(test)


def test_a_preempted_sequence_ends_on_the_old_weights_before_a_drain_is_over():
    async def test():
        async with running(num_blocks=6, step_s=0.001) as it:
            streams = [it.submit(f"r{i}", [i] * 20, max_tokens=40) for i in range(3)]
            await asyncio.gather(*map(anext, streams))
            await it.engine.update(params="second")
            wholes = await asyncio.gather(*map(collect, streams))
            assert it.engine.statistics.preemptions > 0
            for i, (whole,) in enumerate(wholes):
                assert whole.tokens == alone([i] * 20, max_tokens=40)[1:]

    run(test)


def test_recompute_goes_on_with_the_new_weights_at_once():
    async def test():
        async with running(step_s=0.002, enable_kv_cache_events=True) as it:
            stream = it.submit("r", 40, max_tokens=60)
            first = await anext(stream)
            assert await it.engine.update(params="second", mode="recompute") == 1
            (rest,) = await collect(stream)
            tokens = [*first.token_ids, *rest.tokens]
            old = alone(40, max_tokens=60)
            changed = next(i for i, token in enumerate(tokens) if token != old[i])
            known = list(range(40)) + tokens[:changed]
            assert tokens[changed:] == alone(known, max_tokens=60 - changed, weights=1)
            assert it.engine.statistics.preemptions == 1
            assert AllBlocksCleared() in [e for b in it.engine.kv_events._batches for e in b.events]
            await it.idle()

    run(test)


def test_weights_that_do_not_fit_change_nothing():
    async def test():
        async with running(step_s=0.001) as it:
            stream = it.submit("r", 5, max_tokens=40)
            for mode in ("drain", "recompute"):
                with pytest.raises(ValueError, match="do not fit"):
                    await it.engine.update(params="misfit", mode=mode)
            assert (await collect(stream))[0].tokens == alone(5, max_tokens=40)
            assert it.engine.statistics.weight_version == 0

    run(test)


def test_one_update_at_a_time():
    async def test():
        async with running(step_s=0.002) as it:
            stream = it.submit("r", 5, max_tokens=30)
            await anext(stream)
            first = asyncio.create_task(it.engine.update(params="second"))
            await asyncio.sleep(0.01)
            with pytest.raises(EngineBusyError, match="another update"):
                await it.engine.update(params="third")
            assert await first == 1
            await collect(stream)

    run(test)


def test_an_update_of_a_failing_engine_fails():
    async def test():
        async with running(step_s=0.002) as it:
            stream = it.submit("r", 5, max_tokens=300)
            await anext(stream)
            update = asyncio.create_task(it.engine.update(params="second"))
            await asyncio.sleep(0.01)
            it.device.fault = RuntimeError("gone")
            with pytest.raises(EngineError, match="gone"):
                await update
            with pytest.raises(EngineError, match="gone"):
                await collect(stream)

    run(test)


def test_f129_a_pause_and_a_cleared_cache_change_no_text():
    async def test():
        async with running(step_s=0.001, num_speculative_tokens=2) as it:
            stream = it.submit("r", 40, max_tokens=60)
            await anext(stream)
            await it.engine.pause()
            assert it.engine.state.is_paused and it.engine.state.is_healthy
            plans = len(it.device.plans)
            waiting = it.submit("w", 40, max_tokens=3)
            await it.engine.flush(0.0)
            await asyncio.sleep(0.02)
            assert len(it.device.plans) == plans
            await it.engine.resume()
            (rest,), (other,) = await asyncio.gather(collect(stream), collect(waiting))
            assert alone(40, max_tokens=60)[-len(rest.tokens) :] == rest.tokens
            assert other.tokens == alone(40, max_tokens=3) and other.end.cached_tokens == 0
            await it.idle()

    run(test)


def test_a_flush_waits_for_the_engine_to_be_idle():
    async def test():
        async with running(step_s=0.02, enable_kv_cache_events=True) as it:
            stream = it.submit("r", 40, max_tokens=40)
            await anext(stream)
            with pytest.raises(EngineBusyError, match="1 sequences still run after 0.01 s"):
                await it.engine.flush(0.01)
            await it.engine.flush(5.0)
            await collect(stream)
            (again,) = await it.run("again", 40)
            assert again.end.cached_tokens == 0
            await it.engine.flush(5.0)
            feed = it.engine.kv_events

            def events():
                return [event for batch in feed._batches for event in batch.events]

            await soon(lambda: [type(one) for one in events()].count(AllBlocksCleared) == 2)
            assert isinstance(events()[0], BlocksStored)
            assert isinstance(events()[-1], AllBlocksCleared)

    run(test)


def test_the_load_says_what_runs_and_waits():
    async def test():
        async with running(step_s=0.005, max_num_seqs=2) as it:
            streams = [it.submit(f"r{i}", 30 + i, max_tokens=100) for i in range(5)]
            await asyncio.gather(anext(streams[0]), anext(streams[1]))
            await asyncio.sleep(0.1)
            (load,) = it.engine.loads()
            assert (load.num_running, load.num_waiting, load.max_running) == (2, 3, 2)
            assert load.waiting_uncached_tokens == 32 + 33 + 34 - 3 * 16
            assert load.used_tokens > 60 and load.max_tokens == 64 * 16
            assert it.engine.statistics.cache_usage == load.token_usage > 0
            for i in range(5):
                it.engine.abort(f"r{i}")
            await it.idle()
            (load,) = it.engine.loads()
            assert (load.num_running, load.num_waiting, load.tokens_per_second) == (0, 0, 0)

    run(test)


class Listens:
    def __init__(self):
        self.steps: list[StepRecord] = []
        self.ends: list[SequenceRecord] = []

    def on_step(self, step):
        self.steps.append(step)

    def on_finished(self, sequence):
        self.ends.append(sequence)


def test_listeners_get_the_times_of_each_sequence_and_step():
    async def test():
        async with running(step_s=0.002, max_num_batched_tokens=32) as it:
            listener = Listens()
            it.engine.listen(listener)
            await it.run("r", 50, n=2, max_tokens=6)
            aborted = it.submit("a", 5, max_tokens=400)
            await anext(aborted)
            it.engine.abort("a")
            await it.idle()
            await soon(lambda: len(listener.ends) == 3)
            first, second, last = listener.ends
            assert {(one.request_id, one.index, one.n) for one in (first, second)} == {
                ("r", 0, 2), ("r", 1, 2)
            }  # fmt: skip
            assert (first.generation_tokens, first.prompt_tokens, first.max_tokens) == (6, 50, 6)
            for one in (first, second):
                times = one.queue_s, one.prefill_s, one.decode_s
                assert all(time is not None and time >= 0 for time in times)
                assert abs(sum(times) - (one.last_token - one.arrival)) < 1e-9
            assert last.reason == "abort" and last.end >= last.arrival
            assert sum(len(one.first_token_s) for one in listener.steps) == 3
            assert sum(len(one.inter_token_s) for one in listener.steps) >= 10
            assert listener.steps[0].num_tokens == 32
            assert sum(it.engine.statistics.finished.values()) == 3

    run(test)


def test_the_counters_are_those_of_what_clients_got():
    async def test():
        async with running() as it:
            await it.run("r", 40, max_tokens=6)
            await it.run("again", 40, max_tokens=6)
            statistics = it.engine.statistics
            assert (statistics.prompt_tokens, statistics.generation_tokens) == (80, 12)
            assert (statistics.prefix_queries, statistics.prefix_hits) == (80, 32)
            assert statistics.finished["length"] == 2 and statistics.steps >= 12
            await it.idle()

    run(test)


def test_a_profile_begins_and_ends_with_the_steps_that_are_wanted():
    async def test():
        async with running() as it:
            profile = Profile(folder="/tmp/p", start_step=2, num_steps=3)
            await it.engine.start_profile(profile)
            with pytest.raises(EngineBusyError, match="into /tmp/p"):
                await it.engine.start_profile(profile)
            await it.run("r", 5, max_tokens=20)
            starts = [n for n, seen in it.device.profiled_at if seen == "start"]
            stops = [n for n, seen in it.device.profiled_at if seen == "stop"]
            assert starts == [2] and len(stops) == 1 and stops[0] >= 5
            with pytest.raises(EngineBusyError, match="no profile runs"):
                await it.engine.stop_profile()
            await it.engine.start_profile(Profile(folder="/tmp/q"))
            await it.run("s", 5, max_tokens=3)
            assert await it.engine.stop_profile() == "/tmp/q"
            assert [seen for _, seen in it.device.profiled_at] == ["start", "stop"] * 2

    run(test)


def test_an_engine_belongs_to_one_loop_at_a_time():
    async def test():
        async with running() as it:
            await it.run("r", 5)
            wrong = lambda: asyncio.run(it.engine.flush(0))  # noqa: E731
            with pytest.raises(EngineError, match="one event loop"):
                await asyncio.to_thread(wrong)

    run(test)


def test_a_priority_goes_first():
    async def test():
        async with running(step_s=0.001, max_num_seqs=1, scheduling_policy="priority") as it:
            order = []

            async def reads(name, priority):
                await it.run(name, 5, max_tokens=8, more={"priority": priority})
                order.append(name)

            tasks = [asyncio.create_task(reads(n, p)) for n, p in (("a", 0), ("b", 2), ("c", 1))]
            await asyncio.gather(*tasks)
            assert order == ["a", "c", "b"]

    run(test)
