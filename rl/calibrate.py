"""Fits the temperatures of a drafter's confidences from what became of its drafts (spec/dspark 3).

The drafts are those of speculative decoding on held-out prompts, at the temperature that is served,
with all of them tested in each step: widths that confidences chose would hide the others' fate.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Int

from minimax_jax.speculative.calibration import Calibration, fit, write_calibration


@dataclass(frozen=True, kw_only=True)
class DraftedStep:
    """One `speculate` of B sequences, fetched from the device: the `confidence` that their drafts
    were proposed with (a step uses up its state, so this is fetched before it), how many of these
    were `tested` and `accepted`, and which sequences are `running` after it.
    """

    confidence: Float[np.ndarray, "B T"]
    tested: Int[np.ndarray, "B"]
    accepted: Int[np.ndarray, "B"]
    running: Bool[np.ndarray, "B"]

    @property
    def counts(self) -> Bool[np.ndarray, "B"]:
        """Whose drafts all showed what would become of them: a limit leaves drafts untested, and
        what would have been accepted behind a stop token is not known.
        """
        return (self.tested == self.confidence.shape[1]) & self.running


def calibrate(steps: Iterable[DraftedStep], folder: Path | str) -> Calibration:
    """Fits the temperatures of the drafter in `folder` to its record and stores them there.

    Raises ValueError where no block counts.
    """
    steps = list(steps)
    logits = [step.confidence[step.counts] for step in steps]
    accepted = [step.accepted[step.counts] for step in steps]
    if not any(map(len, accepted)):
        raise ValueError(f"{len(steps)} steps have no block whose drafts all were tested")
    calibration = fit(np.concatenate(logits), np.concatenate(accepted))
    write_calibration(folder, calibration)
    return calibration
