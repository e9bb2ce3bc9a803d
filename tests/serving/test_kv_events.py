"""A router that follows the events knows which blocks can be found."""

from serving.scheduling.block_hashes import event_id
from serving.scheduling.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored
from tests.serving.drive import ask, scheduler_of
from tests.serving.fake_device import FakeDevice, run_all


def follow(known: set[int], events: list) -> None:
    for event in events:
        match event:
            case BlocksStored(block_ids=ids):
                known.update(ids)
            case BlocksRemoved(block_ids=ids):
                assert known.issuperset(ids)
                known.difference_update(ids)
            case AllBlocksCleared():
                known.clear()


def test_events_tell_what_can_be_found():
    scheduler = scheduler_of(num_blocks=12, max_model_len=128, enable_kv_cache_events=True)
    device, known = FakeDevice(scheduler), set()
    pages = scheduler.ranks[0].pages
    for number in range(30):
        ask(scheduler, str(number), [number % 4] * (5 + 17 * number % 90), max_tokens=20)
        if number % 3:
            run_all(scheduler, device)
        if number == 20:
            scheduler.forget_prefixes()
        follow(known, pages.events.take())
        assert known == {event_id(name) for name in pages._by_hash}
    assert known


def test_a_stored_event_carries_tokens_parent_and_what_else_names_a_block():
    scheduler = scheduler_of(enable_kv_cache_events=True)
    more = {"adapter": "A", "cache_salt": "tenant"}
    (request,) = ask(scheduler, "r", 100, more=more, max_tokens=1)
    run_all(scheduler, FakeDevice(scheduler))
    first, second = scheduler.ranks[0].pages.events.take()
    assert first.token_ids + second.token_ids == tuple(range(96))
    assert first.parent_id is None and second.parent_id == first.block_ids[-1]
    assert (first.adapter, first.cache_salt, first.block_size) == ("A", "tenant", 16)
    ids = tuple(event_id(name) for name in request.chain[:6])
    assert first.block_ids + second.block_ids == ids


def test_blocks_that_only_one_request_can_find_are_not_told():
    scheduler = scheduler_of(enable_kv_cache_events=True, enable_prefix_caching=False)
    assert scheduler.ranks[0].pages.events is None
