"""The three curves of a GRPO run side by side, as the reference shows them: accuracy, reward, and
how far the trainer's log-probabilities are from the rollout's.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rl.run_log import read_log

# The reference's own curve on M3.1-Flash falls from the one to the other (spec/rl 1.7).
REFERENCE_KL = (0.040, 0.024)
SMOOTHED = 10  # steps of the moving mean
VALIDATION, MEAN = "val-core/", "/acc/mean@"


def plot_runs(folders: Sequence[Path], picture: Path) -> None:
    """Draws the runs of some folders. Raises ValueError for a folder without a log of steps."""
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    accuracy, reward, mismatch = figure.subplots(1, 3)
    for number, folder in enumerate(folders):
        records = read_log(folder / "train.jsonl")
        if not any("critic/rewards/mean" in record for record in records):
            raise ValueError(f"{folder} holds no log of a GRPO run with steps in it")
        style = {"color": f"C{number}"}
        _accuracy(accuracy, records, folder.name, style)
        _smoothed(reward, records, "critic/rewards/mean", folder.name, style)
        _smoothed(mismatch, records, "rollout_corr/k3_kl", f"{folder.name}, k3", style)
    for value in REFERENCE_KL:
        mismatch.axhline(value, color="gray", linestyle=":")
    mismatch.text(0, REFERENCE_KL[0], " the reference, from above to below", va="bottom", size=8)
    accuracy.set(title="accuracy on held-out questions", ylabel="mean", ylim=(0, 1))
    reward.set(title=f"training reward, and its mean of {SMOOTHED} steps", ylabel="reward")
    mismatch.set(title="KL(rollout || trainer)", ylabel="nats a token", yscale="log")
    for axes in (accuracy, reward, mismatch):
        axes.set_xlabel("step")
        axes.legend(fontsize=8)
    figure.savefig(picture, dpi=100)


def _accuracy(axes: Axes, records: Sequence[dict[str, Any]], run: str, style: dict) -> None:
    """Every validation set's curve, with its 95 % interval if there is one."""
    names = {n for record in records for n in record if n.startswith(VALIDATION) and MEAN in n}
    for name in sorted(names):
        rows = [record for record in records if name in record]
        steps = [row["step"] for row in rows]
        axes.plot(steps, [row[name] for row in rows], marker="o", label=f"{run}, {name}", **style)
        low, high = (f"{name.partition('/mean@')[0]}/{side}" for side in ("low", "high"))
        if all(low in row for row in rows):
            below, above = ([row[side] for row in rows] for side in (low, high))
            axes.fill_between(steps, below, above, alpha=0.15, **style)


def _smoothed(
    axes: Axes, records: Sequence[dict[str, Any]], name: str, label: str, style: dict
) -> None:
    rows = [record for record in records if name in record]
    steps, values = [row["step"] for row in rows], [row[name] for row in rows]
    axes.plot(steps, values, alpha=0.3, **style)
    means = []
    for i in range(len(values)):
        part = values[max(0, i + 1 - SMOOTHED) : i + 1]
        means.append(sum(part) / len(part))
    axes.plot(steps, means, label=label, **style)
