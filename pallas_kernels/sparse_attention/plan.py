"""How the decode kernel spreads the parts of its units over warpgroups and CTAs.

A unit is a query and KV head; its chosen blocks are cut into parts of `PART` blocks, whatever the
batch. Who takes a part depends on the number of units, what is added to what does not.
"""

from dataclasses import dataclass

PART = 4  # pages
MULTIPROCESSORS = 132  # of an H200
_TEAMS = 4  # warpgroups of a CTA that fills a multiprocessor: 128 registers a thread


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`together * teams * ctas` parts make a unit."""

    together: int  # parts that a warpgroup takes one after the other
    teams: int  # warpgroups of a CTA
    ctas: int  # of a cluster

    @classmethod
    def of(cls, units: int, parts: int) -> "Plan":
        """Few units are spread over clusters of CTAs with a part each; those that would fill the
        device so have a CTA with a warpgroup for each part, and many a warpgroup each, or two,
        three of which share a multiprocessor.
        """
        if units > MULTIPROCESSORS:
            ctas = 2 if parts > 1 and 2 * units <= 3 * MULTIPROCESSORS else 1
            return cls(together=parts // ctas, teams=1, ctas=ctas)
        if units * parts > 2 * MULTIPROCESSORS:
            teams = min(_TEAMS, parts)
            return cls(together=parts // teams, teams=teams, ctas=1)
        return cls(together=1, teams=1, ctas=parts)

    @property
    def spread(self) -> int:
        """Warpgroups that have parts of one unit."""
        return self.teams * self.ctas

    @property
    def pages(self) -> int:
        """Pages that a warpgroup takes."""
        return self.together * PART

    @property
    def ring(self) -> int:
        """Pages in flight for a warpgroup: all where it has one part and the CTA for itself."""
        return PART if self.together == self.teams == 1 else 2


def parts_of(chosen: int) -> int | None:
    """Parts of a unit with so many blocks: a power of two, at most 8 (a cluster's portable limit);
    None where that is too few.
    """
    return next((n for n in (1, 2, 4, 8) if n * PART >= chosen), None)
