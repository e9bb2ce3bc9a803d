"""What the confidence head's logits are worth: sequential temperature scaling (spec/dspark 3).

Each place of the block has a temperature: the chance of draft k is sigmoid(logit_k / T_k). They
are fitted one after the other, such that the product up to k, the survival of draft k, says how
often it is accepted. They belong to one drafter and its number of drafts and lie in its folder.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

FILE = "confidence_calibration.json"
TEMPERATURES = np.geomspace(0.1, 10.0, 41)  # those that are tried
BINS = 15


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """One temperature a draft, from `num_steps` verifications, and the calibration error that is
    left at each, beside that of the raw logits; both None where nothing was measured.

    Raises ValueError for what cannot be that.
    """

    temperatures: tuple[float, ...]
    num_steps: int = 0
    error: tuple[float, ...] | None = None
    raw_error: tuple[float, ...] | None = None

    def __post_init__(self):
        values = list(self.temperatures)
        if not values or not all(0 < value < math.inf for value in values):
            raise ValueError(f"temperatures={values} are not positive numbers, one a draft")
        if self.num_steps < 0:
            raise ValueError(f"num_steps={self.num_steps} is negative")
        for name in ("error", "raw_error"):
            errors = getattr(self, name)
            if errors is not None and len(errors) != len(values):
                raise ValueError(f"{name}={list(errors)} are not {len(values)}, one a draft")

    @classmethod
    def none(cls, num_drafts: int) -> "Calibration":
        """The head taken at its word."""
        return cls(temperatures=(1.0,) * num_drafts)


def fit(logits: Float[np.ndarray, "N T"], accepted: Int[np.ndarray, "N"]) -> Calibration:
    """The temperatures under which survivals are closest to what happened.

    Row n has the logits of one sequence's drafts in one step, and `accepted[n]` is how many of them
    were kept. All T drafts of each row must have been tested, and no stop token may have cut them:
    a width chosen by confidence hides what would have become of the others. For each place in turn
    the first of `TEMPERATURES` with the least expected calibration error is taken.

    Raises ValueError for shapes, counts or logits that are not such a record.
    """
    logits, accepted = np.asarray(logits, np.float64), np.asarray(accepted)
    _check_records(logits, accepted)
    temperatures, errors, raw_errors = [], [], []
    survival, raw_survival = np.ones(len(logits)), np.ones(len(logits))
    for place, column in enumerate(logits.T):
        kept = accepted > place
        tried = [survival * _sigmoid(column / t) for t in TEMPERATURES]
        tried_errors = [calibration_error(chances, kept) for chances in tried]
        best = int(np.argmin(tried_errors))
        survival, raw_survival = tried[best], raw_survival * _sigmoid(column)
        temperatures.append(float(TEMPERATURES[best]))
        errors.append(tried_errors[best])
        raw_errors.append(calibration_error(raw_survival, kept))
    return Calibration(
        temperatures=tuple(temperatures),
        num_steps=len(logits),
        error=tuple(errors),
        raw_error=tuple(raw_errors),
    )


def calibration_error(
    chances: Float[np.ndarray, "N"], happened: Bool[np.ndarray, "N"], bins: int = BINS
) -> float:
    """The expected calibration error: how far each bin's mean chance is from the share of its cases
    that happened, weighted by its number of cases. The bins are equally wide.
    """
    bin_of = np.minimum((chances * bins).astype(int), bins - 1)
    gap = np.bincount(bin_of, weights=chances - happened, minlength=bins)
    return float(np.abs(gap).sum() / len(chances))


def write_calibration(folder: Path | str, calibration: Calibration) -> None:
    """Writes it beside a drafter, whose folder is given."""
    text = json.dumps(asdict(calibration), indent=1)
    (Path(folder) / FILE).write_text(text + "\n", "utf-8")


def read_calibration(folder: Path | str, num_drafts: int) -> Calibration:
    """That of the drafter in a folder. Released drafters have none: theirs is `Calibration.none`.

    Raises ValueError, with the file's name, for a file that is none or of another number of drafts.
    """
    path = Path(folder) / FILE
    if not path.exists():
        return Calibration.none(num_drafts)
    try:
        calibration = _parsed(json.loads(path.read_text("utf-8")))
        found = len(calibration.temperatures)
        if found != num_drafts:
            raise ValueError(f"{found} temperatures are not one for each of {num_drafts} drafts")
        return calibration
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _check_records(logits: np.ndarray, accepted: np.ndarray) -> None:
    if logits.ndim != 2 or not logits.size or accepted.shape != logits.shape[:1]:
        raise ValueError(
            f"logits {logits.shape} and accepted {accepted.shape} are not records of [N, T] and [N]"
        )
    if not np.isfinite(logits).all():
        raise ValueError(f"{np.sum(~np.isfinite(logits))} of the logits are not finite")
    least, most = accepted.min(), accepted.max()
    if not 0 <= least <= most <= logits.shape[1]:
        raise ValueError(f"accepted counts {least} to {most} are not 0 to {logits.shape[1]}")


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))  # no exponential to overflow


def _parsed(content: Any) -> Calibration:
    known = {"temperatures", "num_steps", "error", "raw_error"}
    if not isinstance(content, dict) or not {"temperatures"} <= content.keys() <= known:
        raise ValueError(f"it is not an object of {', '.join(sorted(known))}")
    errors = {name: content[name] for name in ("error", "raw_error") if content.get(name)}
    numbers = {name: _numbers(name, x) for name, x in errors.items()}
    num_steps = content.get("num_steps", 0)
    if not isinstance(num_steps, int):
        raise ValueError(f"num_steps={num_steps!r} is no whole number")
    temperatures = _numbers("temperatures", content["temperatures"])
    return Calibration(temperatures=temperatures, num_steps=num_steps, **numbers)


def _numbers(name: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, list) or not all(isinstance(x, int | float) for x in value):
        raise ValueError(f"{name}={value!r} is no list of numbers")
    return tuple(map(float, value))
