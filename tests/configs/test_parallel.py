"""The grammar of ParallelConfig and what it refuses."""

import re

import pytest

from configs.parallel import ParallelConfig


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("tp1", {}),
        ("tp4", {"tp": 4}),
        ("tp4,sp", {"tp": 4, "sp": True}),
        ("tp2,ep", {"tp": 2, "ep": 2}),
        ("ep2", {"tp": 2, "ep": 2}),
        ("dep4", {"dp": 4, "ep": 4}),
        ("dp2,tp2,ep", {"dp": 2, "tp": 2, "ep": 4}),
        ("dp11", {"dp": 11}),
        ("tp4,dcp4", {"tp": 4, "dcp": 4}),
        ("ep, tp4 ,sp", {"tp": 4, "ep": 4, "sp": True}),
        ("tp4,sp,mxfp8_reduce", {"tp": 4, "sp": True, "transport": "mxfp8_reduce"}),
        ("tp4,sp,exact", {"tp": 4, "sp": True}),
        ("dep4,overlap", {"dp": 4, "ep": 4, "overlap": True}),
        ("tp8,dcp2,split", {"tp": 8, "dcp": 2, "split": True}),
    ],
)
def test_text_round_trips(text, sizes):
    config = ParallelConfig.parse(text)
    assert config == ParallelConfig(**sizes)
    assert ParallelConfig.parse(str(config)) == config


def test_canonical_text_has_no_short_forms():
    assert str(ParallelConfig.parse("ep2")) == "tp2,ep"
    assert str(ParallelConfig.parse("dep4")) == "dp4,ep"
    assert str(ParallelConfig()) == "tp1"


def test_devices_are_dp_times_tp():
    assert ParallelConfig.parse("dp2,tp4,dcp2,ep").num_devices == 8


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "'' in '' is none of"),
        ("pp2", "'pp2' in 'pp2' is none of"),
        ("tp", "'tp' in 'tp' is none of"),
        ("tp0", "tp=0 is not a positive number of ranks"),
        ("tp2,tp4", "'tp4' in 'tp2,tp4' sets tp a second time"),
        ("dep4,ep", "'ep' in 'dep4,ep' sets ep a second time"),
        ("dep4,tp2", "ep=4 is neither 1 nor dp x tp = 4 x 2 = 8"),
        ("tp4,dcp3", "dcp=3 does not divide tp=4"),
        ("tp4,split", "split shares a context's pages among the dcp ranks, but dcp=1"),
        ("dp2,sp", "sp splits tokens over the tp ranks, but tp=1"),
        ("dp4,overlap", "overlap hides what ranks exchange, but tp=1 and ep=1 exchange nothing"),
        ("tp4,mxfp8", "transport=mxfp8 is of what sp exchanges, but sp is off"),
        ("tp4,sp,exact,mxfp8", "'tp4,sp,exact,mxfp8' names the transports exact and mxfp8"),
    ],
)
def test_impossible_text_is_refused_in_one_sentence(text, sentence):
    with pytest.raises(ValueError, match="^" + re.escape(sentence)):
        ParallelConfig.parse(text)
