"""The times of a sequence, by hand."""

from serving.statistics import SequenceRecord, Statistics


def record(**times) -> SequenceRecord:
    return SequenceRecord(
        **{
            "request_id": "r",
            "index": 0,
            "reason": "stop",
            "n": 1,
            "max_tokens": None,
            "prompt_tokens": 10,
            "cached_tokens": 0,
            "generation_tokens": 5,
            "preemptions": 0,
            "arrival": 1.0,
            "first_scheduled": 2.0,
            "first_token": 4.0,
            "last_token": 8.0,
            "end": 8.5,
        }
        | times
    )


def test_a_sequences_time_is_split_into_queue_prefill_and_decode():
    one = record()
    assert (one.e2e_s, one.queue_s, one.prefill_s, one.decode_s) == (7.5, 1.0, 2.0, 4.0)
    assert (one.inference_s, one.per_token_s) == (6.0, 1.0)


def test_what_never_happened_has_no_time():
    one = record(first_scheduled=None, first_token=None, last_token=None)
    assert (one.queue_s, one.prefill_s, one.decode_s, one.inference_s) == (None,) * 4
    assert (one.per_token_s, record(generation_tokens=1).per_token_s) == (None, None)


def test_every_reason_to_end_is_counted_from_nothing():
    assert Statistics().finished == {"stop": 0, "length": 0, "abort": 0, "error": 0}
