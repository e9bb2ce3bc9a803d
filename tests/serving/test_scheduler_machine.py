"""Random arrivals, aborts, preemptions and flushes, with up to two steps in flight: no sequence
ever reads or writes a place that is not its own, every output is that of a run alone, and nothing
is left behind.
"""

from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from configs.serving import ServingConfig
from serving.scheduling.decode_rows import DraftChoice
from serving.scheduling.request import Asked, Phase
from serving.scheduling.sampling_params import SamplingParams, StructuredOutput
from serving.scheduling.scheduler import Scheduler
from tests.serving.fake_device import FakeDevice, cold_run

CONFIGS = st.fixed_dictionaries(
    {
        "block_size": st.just(4),
        "max_model_len": st.just(40),
        "max_num_seqs": st.integers(2, 5),
        "max_num_batched_tokens": st.sampled_from([20, 26]),
        "enable_prefix_caching": st.booleans(),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "async_scheduling": st.sampled_from([True, True, False]),
        "num_scheduler_steps": st.sampled_from([1, 3]),
        "num_speculative_tokens": st.sampled_from([0, 0, 1, 3]),
        "watermark": st.sampled_from([0.0, 0.1]),
    }
)
PREFIXES = [tuple(range(9)), tuple(range(8)), (1, 2, 3, 4, 5)]
SAMPLING = st.builds(
    SamplingParams,
    n=st.sampled_from([1, 1, 1, 3]),
    max_tokens=st.sampled_from([1, 2, 5, 14, None]),
    stop_token_ids=st.sampled_from([(), (7, 8), tuple(range(10))]),
    min_tokens=st.sampled_from([0, 1]),
    stop=st.sampled_from([(), (), ("x",)]),
    structured_outputs=st.sampled_from(
        [None, None, None, StructuredOutput(kind="regex", text="a")]
    ),
)


def _some_drafts(most: int, rows) -> DraftChoice:
    widths = [min(most, one.num_tokens % 4) for one in rows]
    return DraftChoice(widths, any(widths) or len(rows) % 2 == 0)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        options=CONFIGS,
        num_blocks=st.integers(10, 16),
        num_ranks=st.sampled_from([1, 1, 2]),
        writes_early=st.booleans(),
        sees_stops=st.booleans(),
        kept=st.integers(0, 3),
    )
    def start(self, options, num_blocks, num_ranks, writes_early, sees_stops, kept):
        self.scheduler = Scheduler(
            ServingConfig(**options),
            num_blocks,
            num_ranks=num_ranks,
            choose_drafts=partial(_some_drafts, options["num_speculative_tokens"]),
        )
        self.device = FakeDevice(
            self.scheduler,
            writes_early=writes_early,
            sees_stops=sees_stops,
            kept=lambda width: kept,
        )
        self.out, self.done, self.requests = [], [], []
        self.told: dict[int, list[int]] = {}

    @rule(
        prefix=st.sampled_from(PREFIXES),
        rest=st.lists(st.integers(0, 3), max_size=12),
        sampling=SAMPLING,
        priority=st.integers(-1, 1),
        adapter=st.sampled_from([None, None, "A"]),
        salt=st.sampled_from(["", "", "s"]),
    )
    def arrive(self, prefix, rest, sampling, priority, adapter, salt):
        asked = Asked(
            request_id=str(len(self.requests)),
            prompt=prefix + tuple(rest),
            sampling=sampling,
            priority=priority if self.scheduler.config.scheduling_policy == "priority" else 0,
            adapter=adapter,
            cache_salt=salt,
        )
        self.requests += self.scheduler.add(asked)

    @rule(many=st.integers(1, 4))
    def plan(self, many):
        for _ in range(many):
            plan = self.scheduler.plan()
            if plan is None:
                return
            self.out.append(plan)

    @precondition(lambda self: self.out)
    @rule()
    def the_device_runs(self):
        """Before the result is looked at, and after any number of things in between."""
        self.done.append(self.device.run(self.out.pop(0)))

    @precondition(lambda self: self.out or self.done)
    @rule()
    def commit(self):
        if not self.done:
            self.the_device_runs()
        for request, tokens in self.scheduler.commit(self.done.pop(0)):
            self.told.setdefault(id(request), []).extend(tokens)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        one = data.draw(st.sampled_from(self.requests))
        self.scheduler.abort(one.request_id)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def a_stop_string_is_found(self, data):
        one = data.draw(st.sampled_from(self.requests))
        if one.num_output_tokens > 1:
            self.scheduler.finish(one, "stop", one.num_output_tokens - 1)

    @rule()
    def preempt_all(self):
        self.scheduler.preempt_all()

    @rule()
    def forget(self):
        self.scheduler.forget_prefixes()

    @invariant()
    def the_books_balance(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            while (plan := self.scheduler.plan()) is not None:
                self.out.append(plan)
            if not self.out and not self.done:
                break
            self.commit()
            self.scheduler.check()
        assert not self.scheduler.has_work
        for load in self.scheduler.loads():
            assert load.running == load.draining == load.used_blocks == 0
        for rank in self.scheduler.ranks:
            assert rank.num_free_slots == self.scheduler.config.max_num_seqs
            assert not rank.promised
        for request in self.requests:
            assert request.phase is Phase.FINISHED
            output = request.tokens[request.prompt_length :].tolist()
            expected = cold_run(request)
            whole = request.finish_reason == "length" or request.stop_token is not None
            assert output == (expected if whole else expected[: len(output)])
            assert self.told.get(id(request), [])[: len(output)] == output
        assert not self.scheduler._groups


SchedulerMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None
)
TestScheduler = SchedulerMachine.TestCase


def test_the_device_notices_a_foreign_key():
    scheduler = Scheduler(ServingConfig(block_size=4, max_model_len=40, max_num_seqs=2), 10)
    device = FakeDevice(scheduler)
    scheduler.add(Asked(request_id="a", prompt=range(6), sampling=SamplingParams(max_tokens=3)))
    scheduler.commit(device.run(scheduler.plan()))
    device.pools[0][scheduler.ranks[0].running[0].blocks[0], 2] = 5
    with pytest.raises(AssertionError, match="a reads foreign keys at"):
        device.run(scheduler.plan())
