"""Who owns a block, what can be found, what goes first, and that the books balance."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serving.scheduling.block_hashes import event_id
from serving.scheduling.kv_events import AllBlocksCleared, BlocksRemoved, KvEventLog
from serving.scheduling.pages import Pages


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def publish_all(pages: Pages, blocks: list[int], numbers: range) -> None:
    for block, number in zip(blocks, numbers, strict=True):
        pages.publish(block, name(number))


def test_f78_a_recycled_block_loses_its_old_name():
    pages = Pages(2)
    blocks = pages.allocate(2)
    publish_all(pages, blocks, range(2))
    pages.release(blocks)
    assert pages.num_available == 2
    again = pages.allocate(2)
    assert pages.find([name(0), name(1)]) == []
    pages.check([again])


def test_shared_blocks_stay_until_the_last_owner_goes():
    pages = Pages(3)
    blocks = pages.allocate(2)
    publish_all(pages, blocks, range(2))
    pages.share(pages.find([name(0), name(1)]))
    assert pages.num_sole(blocks) == 0
    pages.release(blocks)
    assert pages.num_available == 1
    assert pages.num_sole(blocks) == 2
    pages.release(blocks)
    assert pages.num_available == 3 and pages.num_cached == 2


def test_the_least_recently_used_goes_first_and_of_one_sequence_the_last():
    pages = Pages(4)
    older, newer = pages.allocate(2), pages.allocate(2)
    publish_all(pages, older, range(2))
    publish_all(pages, newer, range(2, 4))
    pages.release(newer)
    pages.release(older)
    assert pages.allocate(1) == newer[1:]
    assert pages.allocate(1) == newer[:1]
    pages.share(pages.find([name(0)]))
    assert pages.allocate(1) == older[1:]
    assert pages.num_available == 0


def test_how_many_would_be_found_is_known_without_finding_them():
    pages, names = Pages(4), [name(n) for n in range(4)]
    blocks = pages.allocate(4)
    publish_all(pages, blocks, range(4))
    pages.release(blocks)
    for left in (4, 3, 2, 1, 0):
        assert pages.num_found(names) == len(pages.find(names)) == left
        pages.allocate(bool(left))


def test_free_blocks_are_used_before_cached_ones():
    pages = Pages(3)
    blocks = pages.allocate(2)
    pages.publish(blocks[0], name(0))
    pages.release(blocks)
    pages.allocate(2)
    assert pages.find([name(0)]) == blocks[:1]


def test_one_content_is_found_in_one_place():
    pages = Pages(2)
    first, second = pages.allocate(2)
    assert pages.publish(first, name(0))
    assert not pages.publish(second, name(0))
    pages.release([second])
    assert pages.num_cached == 0
    assert pages.find([name(0)]) == [first]


def test_a_search_ends_at_the_first_gap():
    pages = Pages(3)
    blocks = pages.allocate(3)
    publish_all(pages, blocks, range(3))
    pages.release(blocks)
    pages.allocate(1)  # the last of the three
    assert pages.find([name(0), name(1), name(2)]) == blocks[:2]
    assert pages.find([name(2), name(0)]) == []


def test_forgotten_contents_cannot_be_found_but_stay_with_their_owners():
    pages = Pages(3, KvEventLog())
    kept, gone = pages.allocate(1), pages.allocate(1)
    publish_all(pages, kept + gone, range(2))
    pages.release(gone)
    pages.forget_contents()
    assert pages.find([name(0)]) == pages.find([name(1)]) == []
    pages.check([kept])
    pages.release(kept)
    assert pages.num_cached == 0 and pages.num_available == 3
    assert pages.events.take() == [AllBlocksCleared()]


def test_evictions_are_one_event_of_64_bit_ids():
    pages = Pages(2, KvEventLog())
    blocks = pages.allocate(2)
    publish_all(pages, blocks, range(2))
    pages.release(blocks)
    pages.allocate(2)
    removed = BlocksRemoved(block_ids=(event_id(name(1)), event_id(name(0))))
    assert pages.events.take() == [removed]
    assert pages.events.take() == []


def test_misuse_is_noticed():
    pages = Pages(2)
    (block,) = pages.allocate(1)
    with pytest.raises(AssertionError, match="2 blocks of 1 available"):
        pages.allocate(2)
    with pytest.raises(AssertionError, match="owner counts differ"):
        pages.check([])
    pages.release([block])
    with pytest.raises(AssertionError, match="released more often than owned"):
        pages.release([block])
    with pytest.raises(ValueError, match="num_blocks=0 is not a positive"):
        Pages(0)


class PagesMachine(RuleBasedStateMachine):
    """Owners come and go at random; a found block always has the content that was asked for."""

    def __init__(self):
        super().__init__()
        self.pages = Pages(7)
        self.owners: list[list[int]] = []
        self.contents: dict[int, bytes] = {}  # block -> what its owner published there

    @rule(numbers=st.lists(st.integers(0, 5), max_size=4, unique=True))
    def arrive(self, numbers):
        found = self.pages.find([name(n) for n in numbers])
        for block, number in zip(found, numbers, strict=False):
            assert self.contents[block] == name(number)
        rest = numbers[len(found) :]
        left = self.pages.num_available - self.pages.num_taken_from_available(found)
        if len(rest) > left:
            return
        self.pages.share(found)
        new = self.pages.allocate(len(rest))
        for block, number in zip(new, rest, strict=True):
            self.contents.pop(block, None)
            if self.pages.publish(block, name(number)):
                self.contents[block] = name(number)
        self.owners.append(found + new)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def leave(self, data):
        index = data.draw(st.integers(0, len(self.owners) - 1))
        self.pages.release(self.owners.pop(index))

    @rule()
    def forget(self):
        self.pages.forget_contents()

    @invariant()
    def the_books_balance(self):
        self.pages.check(self.owners)


PagesMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestPages = PagesMachine.TestCase
