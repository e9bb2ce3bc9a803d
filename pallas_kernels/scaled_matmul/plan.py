"""How weights are dealt out to the kernels of this package: tiles of 64 rows, and parts of D, the
same ones whatever the batch, so that no sum's order depends on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pallas_kernels.scaled_matmul.weight_tiles import STEP

MULTIPROCESSORS = 132  # of an H200
PART_WIDTHS = (1536, 1024, 512)  # exponents come in multiples of 16 bytes; 1536 x 32 rows fit
_UNITS = 264  # tiles x parts from which on the teams are busy
_WIDE = 16  # rows up to which three steps fit in the ring


@dataclass(frozen=True)
class Plan:
    """How weights of `tiles` tiles in all and D columns are dealt out; no sum depends on M."""

    rows: int  # M
    tiles: int
    columns: int  # D

    @property
    def width(self) -> int:
        """Of a part of D: the widest that leaves every team work."""
        fitting = [w for w in PART_WIDTHS if self.columns % w == 0]
        busy = [w for w in fitting if self.tiles * (self.columns // w) >= _UNITS]
        return busy[0] if busy else fitting[-1]

    @property
    def parts(self) -> int:
        """Of D, each of them one CTA's."""
        return self.columns // self.width

    @property
    def ctas(self) -> int:
        """A multiple of the parts."""
        return max(1, MULTIPROCESSORS // self.parts) * self.parts

    @property
    def steps(self) -> int:
        """Of a tile's part."""
        return self.width // STEP

    @property
    def ring(self) -> int:
        """Steps in flight for a team."""
        return 3 if self.rows <= _WIDE else 2

    @property
    def early(self) -> int:
        """Of these, how many are asked for before x: about as long as x takes."""
        return 1 if self.rows <= 8 else 2

    @property
    def tables(self) -> int:
        """Tiles whose exponents are held at a time."""
        return (self.steps - 1 + self.ring) // self.steps + 1

    @property
    def operand_rows(self) -> int:
        """N: M rounded up to what the matrix unit takes."""
        return -(-self.rows // 8) * 8


def ends(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """First and end of each of some pieces that lie one after the other."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return list(zip([0, *ends[:-1]], ends, strict=True))
