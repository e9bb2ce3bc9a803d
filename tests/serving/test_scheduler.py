"""What the scheduler does with memory, order and time; rows of the field's reports by their ids."""

import pytest

from serving.scheduling.intake import QueueFullError
from serving.scheduling.plan import RankResult, StepResult
from serving.scheduling.sampling_params import StructuredOutput
from serving.scheduling.waiting import MAX_BYPASSES
from tests.serving.drive import ask, output, scheduler_of, step
from tests.serving.fake_device import FakeDevice, cold_run, run_all


def test_f122_decodes_go_on_and_a_short_prompt_passes_a_long_one():
    scheduler = scheduler_of(max_model_len=1024)
    device = FakeDevice(scheduler)
    ask(scheduler, "C", [7] * 5, max_tokens=40)
    step(scheduler, device)
    ask(scheduler, "A", [8] * 640)
    steps = [step(scheduler, device)]
    ask(scheduler, "B", [9] * 10)
    while not any("A" in new for new in steps):
        steps.append(step(scheduler, device))
    assert all(len(new["C"]) == 1 for new in steps)
    first = {name: next(i for i, new in enumerate(steps) if name in new) for name in "AB"}
    assert first["B"] == 1 and first["A"] > 6


def test_the_oldest_prompt_always_gets_on_beside_short_ones():
    scheduler = scheduler_of()
    device = FakeDevice(scheduler)
    (long,) = ask(scheduler, "long", [8] * 320)
    for number in range(40):
        before = long.computed
        ask(scheduler, str(number), [number] * 40, max_tokens=1)
        new = step(scheduler, device)
        if "long" in new:
            break
        assert long.computed >= before + 32
    assert number < 11


def test_f123_a_small_request_passes_one_that_does_not_fit():
    scheduler = scheduler_of(num_blocks=4, max_model_len=64, max_num_seqs=4)
    device = FakeDevice(scheduler)
    ask(scheduler, "there", [1] * 40, max_tokens=8)  # 3 of 4 blocks
    step(scheduler, device)
    ask(scheduler, "big", [2] * 40)
    ask(scheduler, "small", [3] * 5)
    assert "small" in step(scheduler, device)
    run_all(scheduler, device)


def test_f123_one_that_does_not_fit_is_not_passed_for_ever():
    scheduler = scheduler_of(num_blocks=4, max_model_len=64, max_num_seqs=4)
    device = FakeDevice(scheduler)
    for number in range(60):  # one comes and one ends each step: never are 3 blocks free
        ask(scheduler, str(number), [number] * 5, max_tokens=4)
        if number == 4:
            ask(scheduler, "big", [2] * 40)
        if "big" in step(scheduler, device):
            break
    assert 4 + MAX_BYPASSES < number < 4 + MAX_BYPASSES + 10


def test_f126_a_preempted_request_comes_back_as_a_prefill_and_counts_once():
    scheduler = scheduler_of(enable_prefix_caching=True)
    device = FakeDevice(scheduler)
    (request,) = ask(scheduler, "r", 40, max_tokens=12)
    for _ in range(5):
        step(scheduler, device)
    scheduler.preempt_all()
    plan = scheduler.plan()
    (chunk,) = plan.ranks[0].prefills
    assert chunk.start + chunk.length == request.num_tokens and chunk.is_last
    scheduler.commit(device.run(plan))
    run_all(scheduler, device)
    assert output(request) == cold_run(request)
    assert (request.prompt_length, request.num_output_tokens) == (40, 12)
    assert request.cached_tokens == 0 and request.num_preemptions == 1


def test_f128_aborted_requests_leave_nothing_behind():
    scheduler = scheduler_of(num_blocks=40, async_scheduling=True, num_speculative_tokens=3)
    device = FakeDevice(scheduler, writes_early=False)
    pending = []
    for number in range(200):
        ask(scheduler, str(number), [number % 7] * (1 + number % 90), max_tokens=9)
        while number % 3 and (plan := scheduler.plan()) is not None:
            pending.append(plan)
        if pending and number % 2:
            scheduler.commit(device.run(pending.pop(0)))
        scheduler.abort(str(number - number % 5))
    while pending:
        scheduler.commit(device.run(pending.pop(0)))
    for number in range(200):
        scheduler.abort(str(number))
    run_all(scheduler, device)
    (last,) = ask(scheduler, "normal", 30, max_tokens=5)
    run_all(scheduler, device)
    assert output(last) == cold_run(last)
    (load,) = scheduler.loads()
    assert load.running == load.draining == load.used_blocks == 0


@pytest.mark.parametrize("clear", ["forget_prefixes", "preempt_all", "both"])
def test_f129_a_pause_with_a_cleared_cache_loses_no_token(clear):
    scheduler = scheduler_of(async_scheduling=True)
    device = FakeDevice(scheduler)
    (request,) = ask(scheduler, "r", 40, max_tokens=12)
    pending = [scheduler.plan(), scheduler.plan()]
    scheduler.commit(device.run(pending.pop(0)))
    scheduler.is_paused = True
    assert scheduler.plan() is None
    if clear != "forget_prefixes":
        scheduler.preempt_all()
    if clear != "preempt_all":
        scheduler.forget_prefixes()
    scheduler.commit(device.run(pending.pop(0)))
    scheduler.is_paused = False
    run_all(scheduler, device)
    assert output(request) == cold_run(request)


def test_f130_aborts_of_what_is_not_there_do_nothing():
    scheduler = scheduler_of()
    (request,) = ask(scheduler, "r", 5, max_tokens=1)
    assert scheduler.abort("unknown") == []
    run_all(scheduler, FakeDevice(scheduler))
    assert request.finish_reason == "length" and scheduler.abort("r") == []
    (other,) = ask(scheduler, "s", 5)
    assert scheduler.abort("s") == [other] and scheduler.abort("s") == []
    assert other.finish_reason == "abort" and not scheduler.has_work


@pytest.mark.parametrize("shared", [127, 128, 129, 200, 255, 256, 257])
def test_f69_whole_blocks_are_reused_and_no_part_of_one(shared):
    scheduler = scheduler_of(block_size=128, max_num_batched_tokens=1024)
    device = FakeDevice(scheduler)
    ask(scheduler, "one", 300)
    run_all(scheduler, device)
    (two,) = ask(scheduler, "two", [*range(shared), *range(1000, 1100)])
    run_all(scheduler, device)
    assert two.cached_tokens == shared // 128 * 128
    assert output(two) == cold_run(two)


def test_f72_a_prompt_of_whole_blocks_computes_its_last_one_again():
    scheduler = scheduler_of(block_size=128, max_num_batched_tokens=1024)
    device = FakeDevice(scheduler)
    cached, outputs = [], []
    for name in "abc":
        (request,) = ask(scheduler, name, 256, seed=1)
        run_all(scheduler, device)
        cached.append(request.cached_tokens)
        outputs.append(output(request))
    (longer,) = ask(scheduler, "longer", 300)
    run_all(scheduler, device)
    assert cached == [0, 128, 128] and longer.cached_tokens == 256
    assert outputs == [cold_run(request)] * 3


def test_f77_f167_adapters_and_weights_have_prefixes_of_their_own():
    scheduler = scheduler_of()
    device = FakeDevice(scheduler)

    def cached(name, **more):
        (request,) = ask(scheduler, name, 40, more=more)
        run_all(scheduler, device)
        return request.cached_tokens

    assert [cached("1"), cached("2")] == [0, 32]
    assert [cached("3", adapter="A"), cached("4", adapter="A")] == [0, 32]
    assert cached("5", adapter="B") == 0
    assert cached("6", adapter="A", adapter_version=1) == 0
    assert cached("7", cache_salt="tenant") == 0
    scheduler.set_weight_version(1)
    assert [cached("8"), cached("9")] == [0, 32]


def test_new_weights_wait_for_the_running_and_reach_those_that_wait():
    scheduler = scheduler_of()
    device = FakeDevice(scheduler)
    (request,) = ask(scheduler, "r", 40, max_tokens=8)
    step(scheduler, device)
    with pytest.raises(ValueError, match="1 sequences still run on weights 0"):
        scheduler.set_weight_version(1)
    scheduler.preempt_all()
    scheduler.set_weight_version(1)
    run_all(scheduler, device)
    assert request.weight_version == 1 and request.finish_reason == "length"


@pytest.mark.parametrize(("length", "blocks"), [(120, 1), (121, 2), (126, 2), (127, 2), (128, 2)])
def test_f107_blocks_are_there_for_all_that_a_step_may_add(length, blocks):
    scheduler = scheduler_of(block_size=128, num_speculative_tokens=7, max_num_batched_tokens=1024)
    device = FakeDevice(scheduler, writes_early=False)
    (request,) = ask(scheduler, "r", length - 1, max_tokens=100)
    step(scheduler, device)
    assert request.num_tokens == length
    scheduler.plan()
    assert len(request.blocks) == blocks


@pytest.mark.parametrize("constrained", [False, True])
def test_f108_tokens_after_a_preemption_are_those_without_it(constrained):
    grammar = StructuredOutput(kind="regex", text="a*") if constrained else None
    scheduler = scheduler_of(
        num_blocks=5, max_model_len=80, async_scheduling=True, num_speculative_tokens=3
    )
    device = FakeDevice(scheduler, writes_early=False, kept=lambda width: width)
    options = {"max_tokens": 40, "structured_outputs": grammar}
    requests = [*ask(scheduler, "A", [1] * 20, **options), *ask(scheduler, "B", 20, **options)]
    run_all(scheduler, device)
    assert scheduler.room.num_preemptions > 0
    assert [output(one) for one in requests] == [cold_run(one) for one in requests]


def test_f110_drafting_ends_at_the_longest_length_on_every_rank():
    scheduler = scheduler_of(max_model_len=256, num_ranks=2, num_speculative_tokens=7)
    device = FakeDevice(scheduler, writes_early=False, kept=lambda width: width)
    (request,) = ask(scheduler, "r", [1] * 250, max_tokens=None)
    run_all(scheduler, device, most_steps=30)
    assert request.finish_reason == "length" and request.num_tokens == 256
    (after,) = ask(scheduler, "after", [2] * 10)
    run_all(scheduler, device)
    assert output(after) == cold_run(after)


@pytest.mark.parametrize("caching", [True, False])
def test_f115_three_answers_share_one_prompt(caching):
    scheduler = scheduler_of(enable_prefix_caching=caching, max_num_batched_tokens=512)
    device = FakeDevice(scheduler)
    three = ask(scheduler, "r", 130, n=3, seed=7)
    step(scheduler, device)
    step(scheduler, device)
    assert [one.blocks[:8] for one in three[1:]] == [three[0].blocks[:8]] * 2
    assert len({one.blocks[8] for one in three}) == 3
    run_all(scheduler, device)
    assert [output(one) for one in three] == [cold_run(one) for one in three]
    assert len({tuple(output(one)) for one in three}) == 3
    assert [one.cached_tokens for one in three] == [0, 128, 128]
    ask(scheduler, "s", [5] * 130, n=3)
    step(scheduler, device)
    assert len(scheduler.abort("s")) == 3
    run_all(scheduler, device)
    assert scheduler.loads()[0].used_blocks == 0
    (alone,) = ask(scheduler, "t", 130)
    run_all(scheduler, device)
    assert alone.cached_tokens == (128 if caching else 0)


def test_f133_what_can_never_fit_is_refused_on_arrival_with_both_numbers():
    scheduler = scheduler_of(num_blocks=10)
    with pytest.raises(ValueError, match="512 tokens, but with max_model_len=512 at most 511"):
        ask(scheduler, "r", 512)
    with pytest.raises(ValueError, match="grow to 161 needs 11 blocks, but the pool has 10: at"):
        ask(scheduler, "r", 157)
    assert not scheduler.has_work
    (request,) = ask(scheduler, "r", 156)
    run_all(scheduler, FakeDevice(scheduler))
    assert output(request) == cold_run(request)


def test_f188_a_row_of_nan_ends_with_an_error_and_alone():
    scheduler = scheduler_of()
    device = FakeDevice(scheduler)
    (bad,), (good,) = ask(scheduler, "bad", 20), ask(scheduler, "good", [3] * 20)
    step(scheduler, device)
    device.broken.add("bad")
    run_all(scheduler, device)
    assert bad.finish_reason == "error" and good.finish_reason == "length"
    assert output(good) == cold_run(good)


def test_f135_a_scored_prompt_yields_no_token():
    scheduler = scheduler_of()
    device = FakeDevice(scheduler)
    ask(scheduler, "first", 100)
    run_all(scheduler, device)
    (request,) = ask(scheduler, "r", 100, max_tokens=0, prompt_logprobs=1)
    run_all(scheduler, device)
    assert request.finish_reason == "length" and output(request) == []
    assert request.cached_tokens == 0  # a cached block has no log-probabilities


def test_refusals_name_what_is_asked_and_leave_nothing_behind():
    scheduler = scheduler_of(max_waiting_requests=2)
    with pytest.raises(ValueError, match="priority=1 needs scheduling_policy='priority'"):
        ask(scheduler, "r", 5, more={"priority": 1})
    with pytest.raises(ValueError, match="data rank 1 is not in 0..0"):
        ask(scheduler, "r", 5, more={"rank": 1})
    with pytest.raises(ValueError, match="logprobs=21 is more than max_logprobs=20"):
        ask(scheduler, "r", 5, logprobs=21)
    ask(scheduler, "r", 5)
    with pytest.raises(ValueError, match="'r' is here already"):
        ask(scheduler, "r", 5)
    with pytest.raises(QueueFullError, match="1 requests wait, and at most 2 may"):
        ask(scheduler, "s", 5, n=2)
    with pytest.raises(ValueError, match="the result of step 3 comes before that of None"):
        scheduler.commit(StepResult(step_id=3, ranks=[RankResult()]))
    scheduler.abort("r")
    assert not scheduler.has_work
