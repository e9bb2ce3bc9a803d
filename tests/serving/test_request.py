"""A sequence's life: its limits, its ends, and the names of its blocks."""

import pytest

from serving.scheduling.block_hashes import event_id, root_hash
from serving.scheduling.request import Asked, Request, whole_prompt
from serving.scheduling.sampling_params import SamplingParams


def sequences(prompt, *, max_model_len=100, seed=0, **sampling):
    params = SamplingParams(**sampling)
    asked = Asked(request_id="r", prompt=prompt, sampling=params, eos_token_ids=(2,))
    asked = whole_prompt(asked, max_model_len)
    return [
        Request(asked, index, seed=seed, arrival=index, max_model_len=max_model_len)
        for index in range(params.n)
    ]


def test_f105_a_stop_is_tested_before_the_length():
    (request,) = sequences([1], max_tokens=5, stop_token_ids=(12,))
    assert request.take([10, 11, 12, 20, 21, 22]) == [10, 11, 12]
    assert (request.finish_reason, request.stop_token) == ("stop", 12)
    (request,) = sequences([1], max_tokens=5, stop_token_ids=(12,))
    assert request.take([10, 11, 20, 21, 22, 12]) == [10, 11, 20, 21, 22]
    assert (request.finish_reason, request.stop_token) == ("length", None)
    (request,) = sequences([1], max_tokens=5, stop_token_ids=(12,))
    assert request.take([10, 11, 20, 21, 12]) == [10, 11, 20, 21, 12]
    assert request.finish_reason == "stop"


def test_no_stop_ends_a_sequence_before_its_minimum():
    (request,) = sequences([1], max_tokens=5, min_tokens=3)
    assert request.take([2, 2]) == [2, 2]
    assert request.finish_reason is None
    assert request.take([2]) == [2]
    assert request.finish_reason == "stop"


def test_the_end_of_text_can_be_ignored_but_not_the_stop_ids():
    (request,) = sequences([1], max_tokens=5, ignore_eos=True, stop_token_ids=(9,))
    assert request.take([2, 9]) == [2, 9]
    assert request.stop_token == 9


def test_f133_a_prompt_needs_room_for_one_token():
    assert sequences([1] * 99)[0].limit == 100
    for length in (100, 101, 1000):
        with pytest.raises(ValueError, match=f"{length} tokens, but with max_model_len=100 at"):
            sequences([1] * length)
    assert sequences([1] * 100, max_tokens=0, prompt_logprobs=1)[0].yields_nothing
    with pytest.raises(ValueError, match="'r' has an empty prompt"):
        sequences([])


@pytest.mark.parametrize(
    ("truncate", "kept"), [(None, range(99)), (3, range(96, 99)), (-1, range(99))]
)
def test_a_prompt_is_cut_from_the_left(truncate, kept):
    (request,) = sequences(range(99), truncate_prompt_tokens=truncate)
    assert request.tokens.tolist() == list(kept)
    (longer,) = sequences(range(500), truncate_prompt_tokens=-1)
    assert longer.tokens.tolist() == list(range(401, 500))


def test_an_open_length_ends_with_the_model_s():
    assert sequences([1], max_tokens=None)[0].limit == 100
    assert sequences([1], max_tokens=1000)[0].limit == 100
    assert sequences([1], max_tokens=10)[0].limit == 11


def test_f115_sequences_of_one_request_share_the_prompt_and_nothing_else():
    three = sequences(range(130), max_model_len=200, n=3, seed=7)
    assert [one.index for one in three] == [0, 1, 2]
    assert len({one.seed for one in three}) == 3 and three[0].seed == 7
    assert three[0].order < three[1].order < three[2].order
    three[0].take([5])
    assert [one.num_tokens for one in three] == [131, 130, 130]
    assert three[0].hashes(1, 128)[0] == three[2].hashes(1, 128)[0]


def test_the_chain_depends_on_every_token_before():
    (a,), (b,) = sequences(range(64)), sequences([99, *range(1, 64)])
    assert len(a.hashes(4, 16)) == 4
    assert set(a.hashes(4, 16)).isdisjoint(b.hashes(4, 16))
    (c,) = sequences([*range(63), 99])
    assert a.hashes(4, 16)[:3] == c.hashes(4, 16)[:3]
    assert a.hashes(4, 16)[3] != c.hashes(4, 16)[3]


def test_the_chain_grows_to_what_it_is_as_a_whole():
    (grown,) = sequences(range(40))
    first = list(grown.hashes(2, 16))
    grown.take(range(40, 50))
    (whole,) = sequences(range(50))
    assert grown.hashes(3, 16) == whole.hashes(3, 16)
    assert grown.hashes(3, 16)[:2] == first


def test_f77_f167_blocks_of_other_adapters_weights_and_salts_have_other_names():
    names = [
        root_hash(weight_version=version, adapter=adapter, adapter_version=loaded, salt=salt)
        for version in (0, 1)
        for adapter in (None, "A", "B", "None")
        for loaded in (0, 1)
        for salt in ("", "x")
    ]
    assert len(set(names)) == len(names)
    (request,) = sequences(range(64))
    before = list(request.hashes(4, 16))
    request.set_weight_version(1)
    assert set(before).isdisjoint(request.hashes(4, 16))
    assert request.weight_version == 1


def test_ids_of_events_are_signed_64_bit_numbers():
    assert event_id(b"\xff" * 32) == -1
    assert event_id(b"\x00" * 7 + b"\x05" + b"\xff" * 24) == 5
