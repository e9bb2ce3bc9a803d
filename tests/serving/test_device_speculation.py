"""Speculation on a real device: the tokens are those of plain decoding, whatever is drafted."""

from dataclasses import replace
from itertools import count, pairwise
from unittest import mock

import numpy as np
import pytest

from configs.speculative import SpeculativeConfig
from minimax_jax.sampling import packed_mask
from minimax_jax.speculative.calibration import Calibration
from minimax_jax.speculative.setup import Speculation
from serving.device import ModelDevice
from serving.scheduling.decode_rows import DraftChoice
from serving.scheduling.sampling_params import StructuredOutput
from tests.drafter.models import drafted, random_drafter
from tests.model.models import random_loaded, small
from tests.serving.devices import Driver, assert_right, config_of, output

pytestmark = pytest.mark.slow

CONFIG = drafted(small(2, num_tokens=501))
PLAIN = random_loaded(small(2, num_tokens=501))
LOADED = replace(
    PLAIN,
    speculation=Speculation(
        drafter=random_drafter(CONFIG),
        config=SpeculativeConfig(num_speculative_tokens=3, kv_cache_dtype="auto"),
        calibration=Calibration.none(7),
    ),
)


@pytest.fixture(scope="module")
def device():
    config = config_of(num_speculative_tokens=3, max_num_batched_tokens=64)
    made = ModelDevice(LOADED, config, num_blocks=96)
    # Of all shapes those that pack drafts and those that do not: each is two programs, and 15 s.
    made.shapes._rows, made.shapes._decode_tokens = [4], [8, 16]
    yield made
    made.close()


def test_greedy_tokens_are_those_of_plain_decoding_whoever_runs_beside(device):
    driver = Driver(device, PLAIN)
    for i, length in enumerate((1, 16, 47, 100, 300)):
        driver.ask(f"greedy {i}", length, max_tokens=20)
    driver.ask("seeded", 60, max_tokens=20, temperature=1.0, seed=3)
    *greedy, seeded = driver.run()
    for request in greedy:
        assert_right(PLAIN, request)
    assert len(output(seeded)) == 20 or seeded.finish_reason == "stop"
    assert sum(one.draft_tokens for one in greedy) > 0


def test_options_and_preemption_change_nothing_of_greedy_speculation(device):
    driver = Driver(device, PLAIN, num_blocks=14, enable_prefix_caching=False)
    driver.ask("penalties", 40, max_tokens=40, frequency_penalty=0.5, repetition_penalty=1.2)
    driver.ask("edits", 41, max_tokens=40, logit_bias={5: 3.0}, bad_words=("e",))
    driver.ask("stops", 42, max_tokens=40, min_tokens=8, stop_token_ids=tuple(range(0, 500, 13)))
    driver.ask("logprobs", 43, max_tokens=40, logprobs=2)
    asked = driver.run()
    assert sum(one.num_preemptions for one in asked) > 0
    for request in asked:
        assert_right(PLAIN, request)


def test_drafts_come_with_survivals_that_never_rise(device):
    driver = Driver(device, PLAIN)
    driver.ask("r", 50, max_tokens=20)
    driver.run()
    rows = [row for result in driver.results for row in result.confidences.values()]
    drafts = [row for result in driver.results for row in result.drafts.values()]
    assert len(rows) == len(drafts) > 3
    assert all(len(row) == 3 for row in rows + drafts)
    assert all(0 <= b <= a <= 1 for row in rows for a, b in pairwise(row))


def test_a_mask_for_each_draft_binds_the_tokens_there(device):
    driver = Driver(device, PLAIN)
    grammar = StructuredOutput(kind="regex", text="x")
    bound = driver.ask("bound", 40, max_tokens=15, structured_outputs=grammar)
    beside = driver.ask("beside", 41, max_tokens=15)

    def masks(plan):
        """Ids whose remainder by 3 is that of their place."""
        [rank] = plan.ranks
        slots = [row.slot for row in rank.prefills] + rank.decode_slots
        if bound.slot not in slots:
            return {}
        places = bound.num_output_tokens + np.arange(4)
        return {(0, bound.slot): packed_mask(np.arange(501) % 3 == places[:, None] % 3)}

    driver.run(masks)
    assert len(output(bound)) == 15
    assert [token % 3 for token in output(bound)] == [place % 3 for place in range(15)]
    assert_right(PLAIN, beside)


def drafts_by_length(device, chooses) -> tuple[list[int], dict[int, list[int]]]:
    """A sequence's tokens, and the drafts after so many of them."""
    driver, found = Driver(device, PLAIN, choose_drafts=chooses, async_scheduling=False), {}
    request = driver.ask("r", 50, max_tokens=24, ignore_eos=True)
    while driver.step():
        for drafts in driver.results[-1].drafts.values():
            found[request.num_tokens] = drafts
    return output(request), found


def test_steps_without_drafts_leave_the_drafter_as_drafting_steps_would(device):
    step = count()

    def sometimes(requests):
        """Two plain steps, one that draws drafts, one that tests them."""
        place = next(step) % 4
        return DraftChoice([3 * (place == 3)] * len(requests), place >= 2)

    always = drafts_by_length(device, lambda some: DraftChoice([0] * len(some), True))
    tokens, drafts = drafts_by_length(device, sometimes)
    assert tokens == always[0] and 4 < len(drafts) < len(always[1])
    assert all(drafts[length] == always[1][length] for length in drafts)


@pytest.mark.parametrize(
    ("loaded", "drafts", "sentence"),
    [
        (PLAIN, 3, "num_speculative_tokens=3, but the model is loaded without its drafter"),
        (LOADED, 8, "num_speculative_tokens=8 is more than the drafter's 7"),
    ],
)
def test_drafts_that_cannot_be_had_are_refused(loaded, drafts, sentence):
    with pytest.raises(ValueError, match=sentence):
        ModelDevice(loaded, config_of(num_speculative_tokens=drafts), num_blocks=8)


def test_f190_the_warm_up_has_every_program_that_requests_need(device, monkeypatch):
    """It has more: to compile them all takes minutes. A program takes no other shapes."""
    run = mock.Mock(wraps=device._kept.run)
    monkeypatch.setattr(device._kept, "run", run)
    driver = Driver(device, PLAIN, num_blocks=60)
    for i in range(12):
        options = [
            {},
            {"temperature": 0.9, "top_p": 0.8, "seed": i},
            {"logprobs": 2, "prompt_logprobs": 1},
            {"frequency_penalty": 0.5, "logit_bias": {3: 2.0}, "min_tokens": 3},
        ][i % 4]
        driver.ask(f"r{i}", list(range(1 + 27 * i)), max_tokens=1 + i, **options)
    driver.run()
    assert sum(one.draft_tokens for one in driver.asked) > 0
    assert {one.args[0].name for one in run.mock_calls} <= device.calls().keys()
