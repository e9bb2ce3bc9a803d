"""What layouts send, read from the programs that the compiler partitions."""

import json

import pytest

from configs.parallel import ParallelConfig
from configs.presets import PRESETS
from minimax_jax.__main__ import main
from minimax_jax.plan import plan
from minimax_jax.plan.program import Step

pytestmark = pytest.mark.devices(8)
# Bytes of a token for one layer on one of four ranks: the width in bf16 or MXFP8 (33/32 bytes),
# (n-1)/n of it in a gather or scatter and twice that in an all-reduce; experts and their weights
# take 4 x (4 + 4) bytes.
D, ATTENDED, CHOICE = 6144, 8192, 4 * 8 * 3 / 4
WIDE, NARROW = 2 * 3 / 4, 33 / 32 * 3 / 4


def step(text: str, preset: str = "m3_1_flash", **changes) -> Step:
    sizes = {"phase": "prefill", "batch": 1, "tokens": 512, "context": 1024, "layers": 1}
    parallel = ParallelConfig.parse(text)
    return Step(config=PRESETS[preset](), parallel=parallel, **(sizes | changes))


@pytest.mark.slow
def test_a_small_model_sends_what_its_widths_say(capsys):
    flags = "--parallel tp4,sp --transport mxfp8_reduce --layers 1 --tokens 64 --context 64 --json"
    main(["plan", "--preset", "tiny", *flags.split()])
    found = json.loads(capsys.readouterr().out)
    expected = (3 * 128 + 256 / 4) * NARROW + CHOICE
    assert found["collective_bytes_per_token_layer_rank"] == expected
    assert found["transport"] == "mxfp8_reduce" and found["weight_bytes"]["norms"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tp4", 4 * D * WIDE),
        ("tp4,sp", (3 * D + ATTENDED / 4) * WIDE + CHOICE),
        ("tp4,sp,mxfp8", (2 * D + ATTENDED / 4) * NARROW + D * WIDE + CHOICE),
        ("tp4,sp,mxfp8_reduce", (3 * D + ATTENDED / 4) * NARROW + CHOICE),
    ],
)
def test_the_full_width_sends_what_its_widths_say(text, expected):
    assert plan(step(text)).bytes_per_token_layer == expected


@pytest.mark.slow
def test_a_decode_step_sends_two_sums_a_layer():
    found = plan(step("tp4", phase="decode", batch=8, tokens=1))
    assert found.bytes_per_token_layer == 4 * D * WIDE


def small(text: str) -> Step:
    return step(text, "tiny", tokens=64, context=64, layers=2)


@pytest.mark.slow
def test_with_two_micro_batches_every_exchange_has_the_work_of_half_a_layer_beside_it():
    alone, two = plan(small("tp4,sp")), plan(small("tp4,sp,overlap"))
    assert two.bytes_per_token_layer == alone.bytes_per_token_layer
    assert min(sent.work_beside for sent in two.in_layer) > 0.5
    large = [sent for sent in alone.in_layer if sent.bytes_per_token > 2 * CHOICE]
    assert len(large) == 4 and max(sent.work_beside for sent in large) < 0.01


@pytest.mark.slow
def test_tokens_sent_to_their_experts_are_counted_at_an_even_load():
    found = {sent.dtype: sent for sent in plan(small("dep8")).in_layer if sent.is_expected}
    copies = 7 * (1 - (14 * 13 * 12 * 11) / (16 * 15 * 14 * 13))  # 2 of 16 experts a rank, 4 chosen
    assert found["bf16"].bytes_per_token == pytest.approx(copies * 2 * 128 * 2)  # there and back
    assert found["s32"].bytes_per_token == pytest.approx(copies * 4 * (4 + 4))


def test_sizes_of_nothing_are_refused(capsys):
    for flag in ("batch", "tokens", "layers"):
        with pytest.raises(SystemExit):
            main(["plan", "--preset", "tiny", "--parallel", "tp2", f"--{flag}", "0"])
        assert f"{flag}=0 is not at least 1" in capsys.readouterr().err


def test_impossible_steps_are_refused():
    with pytest.raises(ValueError, match="^tokens=2, but a decode step runs one token"):
        step("tp4", phase="decode", tokens=2)
    with pytest.raises(ValueError, match="^context=16 has no room for tokens=512$"):
        step("tp4", context=16)
