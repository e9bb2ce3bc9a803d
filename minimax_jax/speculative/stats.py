"""What speculation came to: how many drafts were verified and kept, in all and by place."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class SpeculationStats:
    """Counts of one sequence's verification steps, or of several sequences' together.

    `reached[k]` is in how many steps at least k + 1 drafts were kept. `committed` are the tokens of
    these steps: the kept drafts and the one that follows them, which a stop may leave out.
    """

    steps: int = 0
    drafted: int = 0  # drafts that were verified
    committed: int = 0
    reached: list[int] = field(default_factory=list)

    @classmethod
    def total(cls, parts: Iterable["SpeculationStats"]) -> "SpeculationStats":
        """The sum of several."""
        whole = cls()
        for part in parts:
            whole.steps += part.steps
            whole.drafted += part.drafted
            whole.committed += part.committed
            missing = len(part.reached) - len(whole.reached)
            whole.reached += [0] * max(0, missing)
            for place, count in enumerate(part.reached):
                whole.reached[place] += count
        return whole

    def record(self, *, tested: int, accepted: int, committed: int, num_drafts: int) -> None:
        """Adds a step that verified the first `tested` of `num_drafts` drafts."""
        self.steps += 1
        self.drafted += tested
        self.committed += committed
        self.reached += [0] * (num_drafts - len(self.reached))
        for place in range(accepted):
            self.reached[place] += 1

    @property
    def accepted(self) -> int:
        """Drafts that were kept."""
        return sum(self.reached)

    @property
    def acceptance_length(self) -> float:
        """Tokens committed a step: 1 + accepted / steps, but for steps that a stop cut short."""
        return self.committed / self.steps if self.steps else 0.0

    @property
    def per_position(self) -> list[float]:
        """The share of steps that kept the draft of each place, all before it included."""
        return [count / self.steps if self.steps else 0.0 for count in self.reached]

    def to_dict(self) -> dict[str, Any]:
        """For JSON, rounded to four places."""
        return {
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_length": round(self.acceptance_length, 4),
            "per_position": [round(share, 4) for share in self.per_position],
        }

    def __str__(self) -> str:
        places = " ".join(f"{share:.2f}" for share in self.per_position)
        return (
            f"{self.acceptance_length:.2f} tokens a step, {self.accepted} of {self.drafted} drafts "
            f"accepted in {self.steps} steps, by place {places or '-'}"
        )
