"""From speculative steps to the drafter's temperatures."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from minimax_jax.decoders import Verified
from minimax_jax.sampling import SamplingParams
from minimax_jax.speculative.calibration import fit, read_calibration
from minimax_jax.speculative.steps import SpeculationOptions
from rl.__main__ import main
from rl.calibrate import calibrate
from tests.speculation.runs import Run

PROMPTS = [[5, 9, 2, 7], [11, 3, 8]]


@pytest.fixture(scope="module")
def steps() -> list[Verified]:
    """Two sequences from their first tokens to their limits, all drafts tested."""
    run = Run.of(PROMPTS, [SamplingParams(temperature=3.0, seed=seed) for seed in (1, 2)])
    assert run.config.drafter
    drafts = run.config.drafter.draft_block
    options = SpeculationOptions(rows=run.count * (drafts + 1))
    cache, state, _ = run.started(40, options)
    found = []
    while bool(state.anchors.running.any()):
        confidence = np.array(state.proposal.confidence)
        cache, state, done = run.step(cache, state, drafts, options)
        tested, accepted = jax.device_get((done.tested, done.accepted))
        running = np.array(state.anchors.running)
        found.append(
            Verified(
                num_drafts=drafts,
                confidence=confidence,
                tested=tested,
                accepted=accepted,
                running=running,
            )
        )
    return found


def test_the_blocks_that_count_are_fitted(steps):
    found = calibrate(steps)
    drafts = steps[0].confidence.shape[1]
    logits, accepted = [], []
    for step in steps:
        for row in range(len(PROMPTS)):
            if step.tested[row] == drafts and step.running[row]:
                logits.append(step.confidence[row])
                accepted.append(step.accepted[row])
    assert 0 < len(accepted) < 2 * len(steps), "every block counts: the limit was never met"
    assert fit(np.stack(logits), np.array(accepted)) == found


def test_blocks_that_were_cut_are_left_out(steps):
    whole = calibrate(steps)
    stopped = replace(steps[0], running=np.zeros(2, bool))
    narrow = replace(steps[0], tested=steps[0].tested - 1)
    assert calibrate([*steps, stopped, narrow]) == whole
    with pytest.raises(ValueError, match="2 steps have no block whose drafts all were tested"):
        calibrate([stopped, narrow])


def test_the_command_fits_a_models_own_drafter_and_stores_it(tmp_path, capsys):
    main(["calibrate", "--n", "8", "--out", str(tmp_path)])
    found = read_calibration(tmp_path, 7)
    assert found.num_steps > 8 and found.error is not None and found.raw_error is not None
    assert all(ours <= raw for ours, raw in zip(found.error[:1], found.raw_error, strict=False))
    assert f"{found.num_steps} blocks" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize(
    ("flags", "sentence"), [(["--n", "0"], "n=0"), (["--family", "x"], "family 'x'")]
)
def test_what_cannot_be_calibrated_on_is_one_sentence(flags, sentence, capsys):
    with pytest.raises(SystemExit):
        main(["calibrate", *flags])
    assert sentence in capsys.readouterr().err
