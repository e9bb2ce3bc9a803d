"""Who goes first, who gives way, who waits for whom, and where a request goes."""

import pickle

import pytest

from serving.scheduling.sampling_params import StructuredOutput
from tests.serving.drive import ask, output, scheduler_of, step
from tests.serving.fake_device import FakeDevice, cold_run, run_all


def finish_order(scheduler, device):
    progress = run_all(scheduler, device)
    last = {request.request_id: place for place, (request, _) in enumerate(progress)}
    return sorted(last, key=last.__getitem__)


def test_the_more_urgent_goes_first_and_then_the_older():
    scheduler = scheduler_of(max_num_seqs=1, scheduling_policy="priority")
    for name, priority in [("a", 1), ("b", 0), ("c", -1), ("d", 0)]:
        ask(scheduler, name, [5] * 10, max_tokens=1, more={"priority": priority})
    assert finish_order(scheduler, FakeDevice(scheduler)) == ["c", "b", "d", "a"]


@pytest.mark.parametrize("tight", ["slots", "blocks"])
def test_an_urgent_request_takes_the_place_of_a_less_urgent_one(tight):
    limits = {"slots": {"max_num_seqs": 1}, "blocks": {"num_blocks": 4, "max_model_len": 64}}
    scheduler = scheduler_of(scheduling_policy="priority", async_scheduling=True, **limits[tight])
    device = FakeDevice(scheduler)
    (slow,) = ask(scheduler, "slow", [1] * 40, max_tokens=20)
    step(scheduler, device)
    (urgent,) = ask(scheduler, "urgent", [2] * 40, max_tokens=2, more={"priority": -1})
    assert finish_order(scheduler, device) == ["urgent", "slow"]
    assert (slow.num_preemptions, urgent.num_preemptions) == (1, 0)
    assert output(slow) == cold_run(slow)


def test_an_equally_urgent_request_takes_nothing():
    scheduler = scheduler_of(max_num_seqs=1, scheduling_policy="priority")
    ask(scheduler, "one", [1] * 40, max_tokens=20)
    step(scheduler, FakeDevice(scheduler))
    ask(scheduler, "two", [2] * 5, max_tokens=1)
    assert [scheduler.plan() is not None, scheduler.room.num_preemptions] == [True, 0]


def test_the_youngest_gives_way_when_blocks_run_out_and_the_oldest_never():
    scheduler = scheduler_of(num_blocks=8, max_model_len=96, async_scheduling=True)
    device = FakeDevice(scheduler)
    requests = [ask(scheduler, name, [ord(name)] * 17, max_tokens=60)[0] for name in "abc"]
    run_all(scheduler, device)
    assert requests[0].num_preemptions == 0
    assert requests[2].num_preemptions > 0
    assert [output(one) for one in requests] == [cold_run(one) for one in requests]


def test_preemptions_do_not_outnumber_what_growth_explains():
    scheduler = scheduler_of(num_blocks=12, max_model_len=96, async_scheduling=True)
    device = FakeDevice(scheduler)
    for number in range(8):
        ask(scheduler, str(number), [number] * 17, max_tokens=60)
    run_all(scheduler, device)
    assert 0 < scheduler.room.num_preemptions <= 16  # two a request, not one a step


def test_a_prompt_that_is_just_being_computed_is_not_computed_twice():
    scheduler = scheduler_of(max_num_batched_tokens=64)
    device = FakeDevice(scheduler)
    requests = [ask(scheduler, name, 130)[0] for name in "abc"]
    (other,) = ask(scheduler, "other", [9] * 30)
    step(scheduler, device)
    assert [one.cached_tokens for one in (*requests, other)] == [0, None, None, 0]
    run_all(scheduler, device)
    assert [one.cached_tokens for one in requests] == [0, 128, 128]
    assert (scheduler.admission.prefix_hits, scheduler.admission.prefix_queries) == (256, 420)


def test_those_who_wait_for_a_prompt_go_on_when_its_owner_is_gone():
    scheduler = scheduler_of()
    device = FakeDevice(scheduler)
    ask(scheduler, "a", 300)
    (other,) = ask(scheduler, "b", 300)
    step(scheduler, device)
    scheduler.abort("a")
    run_all(scheduler, device)
    assert output(other) == cold_run(other) and other.cached_tokens == 64


def test_a_request_goes_to_the_rank_that_has_its_prefix_unless_that_is_busier():
    scheduler = scheduler_of(num_ranks=2, max_num_batched_tokens=512)
    device = FakeDevice(scheduler)
    ask(scheduler, "a", 100, more={"rank": 1})
    run_all(scheduler, device)
    (same,), (new,) = ask(scheduler, "b", 120), ask(scheduler, "c", [7] * 200)
    scheduler.commit(device.run(scheduler.plan()))
    assert (same.rank, same.cached_tokens, new.rank) == (1, 96, 0)
    ask(scheduler, "long", [8] * 400, more={"rank": 1})
    (fled,) = ask(scheduler, "d", 110)
    scheduler.plan()
    assert fled.rank == 0


def test_requests_spread_over_ranks():
    scheduler = scheduler_of(num_ranks=4, max_num_batched_tokens=512)
    for number in range(8):
        ask(scheduler, str(number), [number] * 30)
    scheduler.plan()
    assert [load.running for load in scheduler.loads()] == [2, 2, 2, 2]


def test_many_steps_are_for_when_nothing_waits():
    scheduler = scheduler_of(num_scheduler_steps=4, max_num_seqs=2)
    device = FakeDevice(scheduler)

    def steps_of_next():
        plan = scheduler.plan()
        scheduler.commit(device.run(plan))
        return plan.decode_shape and plan.decode_shape.steps

    (one,) = ask(scheduler, "a", [1] * 5, max_tokens=30)
    assert [steps_of_next(), steps_of_next()] == [None, 4]
    ask(scheduler, "b", [2] * 100, max_tokens=30)
    assert [steps_of_next(), steps_of_next(), steps_of_next()] == [1, 1, 4]
    ask(scheduler, "c", [3] * 5)
    assert steps_of_next() == 1
    scheduler.abort("c")
    scheduler.abort("b")
    assert steps_of_next() == 4
    ask(scheduler, "d", [3] * 5, stop=("x",), max_tokens=10)
    assert [steps_of_next() for _ in range(3)] == [1, 1, 1]
    run_all(scheduler, device)
    assert output(one) == cold_run(one)


def test_a_grammar_sees_every_token_before_the_next_is_planned():
    grammar = StructuredOutput(kind="json", text="{}")
    scheduler = scheduler_of(async_scheduling=True)
    device = FakeDevice(scheduler)
    ask(scheduler, "free", [1] * 5, max_tokens=9)
    (bound,) = ask(scheduler, "bound", [2] * 5, max_tokens=9, structured_outputs=grammar)
    first, second = scheduler.plan(), scheduler.plan()
    assert len(first.ranks[0].prefills) == 2
    assert second.ranks[0].decode_slots == [0] and bound.slot == 1
    assert scheduler.plan() is None  # two are out
    scheduler.commit(device.run(first))
    assert scheduler.plan().ranks[0].decode_slots == [0, 1]


def test_equal_inputs_give_equal_plans():
    def plans():
        scheduler = scheduler_of(
            num_blocks=24, num_ranks=2, max_model_len=128, async_scheduling=True
        )
        device, pending, seen = FakeDevice(scheduler), [], []
        for number in range(60):
            ask(scheduler, str(number), [number % 5] * (1 + 13 * number % 90), max_tokens=12)
            while (plan := scheduler.plan()) is not None:
                seen.append(pickle.dumps(plan))
                pending.append(plan)
            scheduler.commit(device.run(pending.pop(0)))
            scheduler.abort(str(number - 7) if number % 4 == 0 else "")
        return seen

    first, second = plans(), plans()
    assert len(first) > 50 and first == second
