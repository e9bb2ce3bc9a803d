"""Subscribers of KV events see every batch once and in order, or are told to start anew."""

import asyncio
from contextlib import aclosing

from serving.kv_feed import KvFeed
from serving.scheduling.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored
from tests.serving.servers import run


def removed(block: int) -> list:
    return [BlocksRemoved(block_ids=(block,))]


def stored(num_tokens: int) -> list:
    ids = tuple(range(num_tokens))
    event = BlocksStored(
        block_ids=(1,), parent_id=None, token_ids=ids, block_size=16, adapter=None, cache_salt=""
    )
    return [event]


async def taken(feed: KvFeed, start: int, count: int) -> list:
    async with aclosing(feed.subscribe(start, 0.01)) as batches:
        return [await anext(batches) for _ in range(count)]


def numbers(feed: KvFeed, start: int, count: int) -> list[int]:
    return [one.number for one in run(lambda: taken(feed, start, count))]


def test_the_whole_history_is_the_present_state():
    feed = KvFeed()
    for block in range(3):
        feed.publish(0, removed(block))
    assert numbers(feed, 0, 3) == [1, 2, 3]
    assert numbers(feed, 2, 2) == [2, 3]


def test_nothing_is_no_batch_and_silence_is_told():
    feed = KvFeed()
    feed.publish(0, [])
    assert run(lambda: taken(feed, 0, 2)) == [None, None]
    assert feed.last_number == 0


def test_one_who_waits_gets_what_comes_and_two_get_the_same():
    async def test():
        feed = KvFeed()
        readers = [asyncio.create_task(taken(feed, 1, 2)) for _ in range(2)]
        await asyncio.sleep(0)
        feed.publish(0, removed(7))
        feed.publish(1, removed(8))
        return await asyncio.gather(*readers)

    one, other = run(test)
    assert one == other and [batch.rank for batch in one] == [0, 1]


def test_one_who_asks_for_what_is_forgotten_starts_anew_on_every_rank():
    feed = KvFeed(2, max_batches=3)
    for block in range(9):
        feed.publish(block % 2, removed(block))
    batches = run(lambda: taken(feed, 4, 3))
    assert [(one.number, one.rank) for one in batches[:2]] == [(8, 0), (9, 1)]
    assert [one.events for one in batches[:2]] == [(AllBlocksCleared(),)] * 2
    assert batches[2] is None
    assert numbers(feed, 7, 3) == [7, 8, 9]


def test_one_who_falls_behind_starts_anew():
    async def test():
        feed = KvFeed(max_batches=2)
        feed.publish(0, removed(0))
        async with aclosing(feed.subscribe(0, 0.01)) as batches:
            assert (await anext(batches)).number == 1
            for block in range(1, 6):
                feed.publish(0, removed(block))
            fresh = await anext(batches)
            assert (fresh.number, fresh.events) == (6, (AllBlocksCleared(),))
            feed.publish(0, removed(6))
            assert (await anext(batches)).number == 7

    run(test)


def test_a_number_of_an_engine_before_this_one_is_the_beginning():
    feed = KvFeed()
    feed.publish(0, removed(0))
    assert numbers(feed, 500, 1) == [1]


def test_the_history_is_bounded_by_its_tokens_too():
    feed = KvFeed(max_tokens=100)
    for _ in range(5):
        feed.publish(0, stored(40))
    assert numbers(feed, 4, 2) == [4, 5]
    assert run(lambda: taken(feed, 3, 1))[0].events == (AllBlocksCleared(),)
