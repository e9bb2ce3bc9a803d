"""What process 0 and the others tell one another, and what becomes of one when another is gone."""

import socket
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minimax_jax.lora import LowRank
from serving.device.programs import Call
from serving.device.sampler import Asks, Rows
from serving.engine_api import Profile
from serving.processes import adapter_arrays, program_run
from serving.processes.follower import ENDED_EARLY, Follower
from serving.processes.leader import Leader
from serving.processes.link import Kind, Link, LostError

FLAGS = {"limits": "some", "--lora": "none"}
PATIENCE_S = 60.0


def rows(seed: int) -> Rows:
    """Five decode rows; a multiple of no alignment."""
    random = np.random.default_rng(seed)
    bits = [np.array(bool(bit)) for bit in random.integers(0, 2, 4)]
    return Rows(
        slots=random.integers(0, 9, 5, np.int32),
        has_mask=random.integers(0, 2, 5) > 0,
        asks=Asks(edits=bits[0], penalties=bits[1], masks=bits[2], logprobs=bits[3]),
    )


def call(name: str, *host) -> Call:
    return Call(name=name, kind="rows", step=lambda: None, host=host)


CALLS = {
    "decode": call("decode", rows(0)),
    "block tables": call("block tables", np.zeros((3, 3), np.int32)),
    "masks": call("masks", np.zeros(8, np.int32), np.zeros((8, 4, 1001), np.uint32)),
}


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    """Process 0's end of a connection, and process 1's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    made = Link(accepted, "process 1"), Link(client, "process 0")
    yield made
    for link in made:
        link.close()


class StandIn:
    """Notes what a follower has its device do."""

    def __init__(self):
        self.done: SimpleQueue = SimpleQueue()
        self.fault = ""

    def calls(self):
        return CALLS

    def run(self, made: Call, times: int) -> None:
        if self.fault:
            raise RuntimeError(self.fault)
        self.done.put((made, times))

    def update(self, *, adapters) -> None:
        self.done.put(adapters)

    def start_profile(self, profile: Profile) -> None:
        self.done.put(profile)

    def stop_profile(self) -> None:
        self.done.put("stopped")

    def next(self):
        return self.done.get(timeout=PATIENCE_S)


class Two:
    """A leader and a follower in one process. `left` gets the code with which the latter leaves,
    `lost` the sentence that the former hears of it.
    """

    def __init__(self, ends: tuple[Link, Link], device: StandIn | None = None, flags=FLAGS):
        self.ends, self.left, self.lost = ends, SimpleQueue(), SimpleQueue()
        self.leader = Leader({1: ends[0]})
        self.leader.on_lost = self.lost.put
        self.follower = Follower(ends[1], self.leave)
        self.agreed: list[int] = []
        self.thread = threading.Thread(target=self.follow, args=(device, flags), daemon=True)
        self.thread.start()

    def leave(self, code: int) -> None:
        self.left.put(code)
        self.ends[1].close()

    def follow(self, device: StandIn | None, flags) -> None:
        self.agreed.append(self.follower.agree(flags, 7))
        if device is not None:
            self.follower.follow(device)  # type: ignore[arg-type]

    def start(self) -> None:
        assert self.leader.agree(FLAGS, 9) == 7
        self.leader.await_ready()


def assert_same(made: Call, sent: tuple) -> None:
    for got, wanted in zip(jax.tree.leaves(made.host), jax.tree.leaves(sent), strict=True):
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("adapter", [None, "", "poet"])
def test_a_run_of_a_program_arrives_as_it_was_sent(adapter):
    body = memoryview(program_run.encoded("decode", adapter, (rows(3),), 8))
    made, times = program_run.decoded(body, CALLS)
    assert (made.name, made.adapter, times) == ("decode", adapter, 8)
    assert_same(made, (rows(3),))


def test_of_masks_those_of_rows_with_a_grammar_travel_alone():
    at, masks = np.arange(8, dtype=np.int32), np.zeros((8, 4, 1001), np.uint32)
    masks[2, :2], masks[7, 3, 1000] = 0xFFFFFFFF, 1
    body = program_run.encoded("masks", None, (at, masks), 1)
    assert 3 * 4004 < len(body) < 3 * 4004 + 200
    assert_same(program_run.decoded(memoryview(body), CALLS)[0], (at, masks))
    none = program_run.encoded("masks", None, (at, masks * 0), 1)
    assert len(none) < 100
    wrong = none[:-8] + np.array([1, 32], np.uint32).tobytes() + bytes(4008)
    with pytest.raises(ValueError, match="an array of 32 rows comes with a row 32"):
        program_run.decoded(memoryview(wrong), CALLS)


@pytest.mark.parametrize(
    ("name", "host", "cut", "sentence"),
    [
        ("sort", (rows(3),), 0, "process 0 runs 'sort', which was not compiled here"),
        ("decode", (rows(3),), 8, "a message of [0-9]+ bytes is cut off"),
        ("decode", (rows(3), rows(4)), 0, "'decode' comes with [0-9]+ bytes more than it takes"),
    ],
)
def test_a_message_that_fits_no_program_is_refused(name, host, cut, sentence):
    body = program_run.encoded(name, None, host, 1)
    with pytest.raises(ValueError, match=sentence):
        program_run.decoded(memoryview(body[: len(body) - cut]), CALLS)


def test_adapters_arrive_as_they_were_sent():
    part = LowRank(a=jnp.ones((2, 3)), b=jnp.full((4, 2), 0.5), scale=2.0)
    sent = {"poet": {"layers": {"0": {"q": part}, "1": {"q": part}}}, "empty": {}}
    got = adapter_arrays.decoded(memoryview(adapter_arrays.encoded(sent)))
    assert jax.tree.structure(got) == jax.tree.structure(sent)
    for new, old in zip(jax.tree.leaves(got), jax.tree.leaves(sent), strict=True):
        np.testing.assert_array_equal(new, old)


def test_a_follower_does_what_it_is_told_in_order_and_ends_when_all_is_over(ends):
    device = StandIn()
    two = Two(ends, device)
    two.start()
    entries = np.arange(9, dtype=np.int32).reshape(3, 3)
    two.leader.run("block tables", None, (entries,), 1)
    two.leader.run("decode", "poet", (rows(1),), 4)
    two.leader.update({"poet": {}})
    two.leader.start_profile(Profile(folder="here", num_steps=3))
    two.leader.stop_profile()
    (first, once), (second, often) = device.next(), device.next()
    assert (first.name, once, second.name, second.adapter, often) == (
        "block tables",
        1,
        "decode",
        "poet",
        4,
    )
    assert_same(first, (entries,))
    assert_same(second, (rows(1),))
    assert device.next() == {"poet": {}}
    assert device.next() == Profile(folder="here/process-1", num_steps=3)
    assert device.next() == "stopped"
    two.leader.end()
    two.thread.join(PATIENCE_S)
    assert not two.thread.is_alive() and two.left.empty() and two.lost.empty()


def test_a_follower_that_was_asked_to_end_leaves_that_to_process_0(ends):
    two, drained = Two(ends, StandIn()), threading.Event()
    two.leader.on_drain = drained.set
    two.start()
    two.follower.ask_for_end()
    assert drained.wait(PATIENCE_S) and two.left.empty()
    two.leader.end()


def test_a_follower_without_process_0_leaves_with_a_fault(ends):
    two = Two(ends, StandIn())
    two.start()
    two.ends[0]._connection.shutdown(socket.SHUT_RDWR)  # what the end of a process does
    assert two.left.get(timeout=PATIENCE_S) == 1


def test_a_follower_whose_device_fails_says_why_before_it_leaves(ends):
    device = StandIn()
    device.fault = "no memory"
    two = Two(ends, device)
    two.start()
    two.leader.run("decode", None, (rows(1),), 1)
    assert two.left.get(timeout=PATIENCE_S) == 1
    sentence = "process 1 has ended: the engine has failed: no memory"
    assert two.lost.get(timeout=PATIENCE_S) == sentence == two.leader.loss()


def test_an_end_before_all_are_ready_is_an_early_one(ends):
    two = Two(ends)
    assert two.leader.agree(FLAGS, 9) == 7
    two.leader.end()
    assert two.left.get(timeout=PATIENCE_S) == ENDED_EARLY


def test_processes_with_different_flags_are_refused_by_name(ends):
    two = Two(ends, flags=FLAGS | {"--lora": "poet"})
    with pytest.raises(ValueError, match="process 1 was started with --lora poet, and process 0"):
        two.leader.agree(FLAGS, 9)
    two.leader.end()


def test_a_start_fails_when_a_process_is_gone(ends):
    near, far = ends
    leader = Leader({1: near})
    far.close()
    with pytest.raises(ValueError, match="process 1 has ended"):
        leader.agree(FLAGS, 9)


def test_nothing_can_be_sent_to_a_process_that_is_gone(ends):
    near, far = ends
    far.close()
    with pytest.raises(LostError, match="process 1 has ended"):
        near.receive()
    with pytest.raises(LostError, match="process 1 has ended"):
        for _ in range(3):  # the first is what the kernel refuses
            near.send(Kind.RUN, bytes(1 << 16))
