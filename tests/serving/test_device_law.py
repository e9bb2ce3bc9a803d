"""Seeded requests that speculate through the engine's slots have the target's law: in and out of
slots, beside one another, with steps that draft and steps that do not.
"""

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from jax.scipy.stats import chi2

from configs.speculative import SpeculativeConfig
from minimax_jax.sampling import SamplingParams as RowParams
from minimax_jax.speculative.calibration import Calibration
from minimax_jax.speculative.setup import Speculation
from serving.device import ModelDevice
from serving.scheduling.decode_rows import DraftChoice
from tests.model.models import random_loaded, small
from tests.serving.devices import Driver, config_of, output
from tests.speculation.test_step_law import DRAFTER, MODEL, PROMPT, V, exact_law

pytestmark = pytest.mark.slow

REQUESTS, SLOTS, DRAFTS, LEVEL = 4096, 64, 3, 1e-4
LOADED = replace(
    random_loaded(small(num_tokens=V)),
    model=MODEL,
    speculation=Speculation(
        drafter=DRAFTER,
        config=SpeculativeConfig(num_speculative_tokens=DRAFTS, kv_cache_dtype="auto"),
        calibration=Calibration.none(7),
    ),
)


def p_value(observed: np.ndarray, temperature: float) -> float:
    """How likely counts as far as these are from the law at a temperature, under that law."""
    expected = exact_law(RowParams(temperature=temperature)).ravel() * REQUESTS
    common = expected >= 5
    observed, expected = (np.append(x[common], x[~common].sum()) for x in (observed, expected))
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(chi2.sf(statistic, len(observed) - 1))


def test_three_tokens_have_the_targets_law():
    options = {"max_num_seqs": SLOTS, "max_num_batched_tokens": 256, "max_model_len": 32}
    config = config_of(num_speculative_tokens=DRAFTS, **options)
    device, steps = ModelDevice(LOADED, config, num_blocks=2 * SLOTS), count()

    def chooses(requests):
        """Every fourth step is a plain one; what is tested depends on the step alone."""
        step = next(steps)
        widths = [
            (step + place) % (DRAFTS + 1) * one.has_drafts for place, one in enumerate(requests)
        ]
        return DraftChoice(widths, True) if step % 4 else DraftChoice([0] * len(widths), False)

    driver = Driver(device, LOADED, choose_drafts=chooses)
    for shapes in (device.shapes, driver.scheduler.shapes):  # one program of each kind
        shapes._rows, shapes._decode_tokens = [SLOTS], [SLOTS * (1 + DRAFTS)]
    for seed in range(REQUESTS):
        driver.ask(
            f"r{seed}", PROMPT.tolist(), temperature=2.0, seed=seed, max_tokens=3, ignore_eos=True
        )
    asked = driver.run(most_steps=4 * REQUESTS)
    device.close()
    cells = np.array([output(one) for one in asked]) @ [V * V, V, 1]
    observed = np.bincount(cells, minlength=V**3)
    tested, kept = (
        sum(getattr(one, f"{name}_tokens") for one in asked) for name in ("draft", "accepted")
    )
    value, wrong = p_value(observed, 2.0), p_value(observed, 1.6)
    print(f"p {value:.3f}, {kept} of {tested} drafts kept; against another law {wrong:.1e}")
    assert tested > REQUESTS / 2 and 0.1 < kept / tested < 0.9
    assert value >= LEVEL > wrong
