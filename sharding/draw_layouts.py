"""Draws one layer under each layout, top to bottom: what a rank holds, and what the ranks exchange.

    python sharding/draw_layouts.py         writes pictures/*.svg

A row is an array, cut into cells along its main axis; of a cell the coloured part is what the rank
holds. The example has 4 ranks, 4 sequences, 8 query and 4 key heads, 8 experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path

Part = tuple[float, float]  # of a cell, from its top
ALL, NONE = (0.0, 1.0), (0.0, 0.0)
TOKENS, HEADS, PAGES, EXPERTS = "#4477aa", "#cc7722", "#228855", "#884499"

LABEL, COLUMN, GAP = 176, 132, 16  # widths, in pixels
CELLS, ROW, BAND = 26, 40, 34  # heights: of cells, of a row with its distance, of an exchange
TOP, WIDTH = 34, LABEL + 4 * (COLUMN + GAP)


@dataclass(frozen=True, kw_only=True)
class Row:
    """An array of so many cells, and which part of each a rank holds."""

    name: str
    colour: str
    cells: int
    held: Callable[[int, int], Part]  # rank, cell


def row(name: str, colour: str, cells: int, held: Callable[[int, int], Part] | None = None) -> Row:
    """A row; without `held` every rank has all of it."""
    return Row(name=name, colour=colour, cells=cells, held=held or (lambda rank, cell: ALL))


def own(
    count: int, of_rank: Callable[[int], int] = lambda rank: rank
) -> Callable[[int, int], Part]:
    """Whole cells, `count` neighbours a rank, by a rank's place among those that share."""
    return lambda rank, cell: ALL if cell // count == of_rank(rank) else NONE


def share(
    ranks: int, of_rank: Callable[[int], int] = lambda rank: rank
) -> Callable[[int, int], Part]:
    """Of each cell one of `ranks` parts."""
    return lambda rank, cell: (of_rank(rank) / ranks, (of_rank(rank) + 1) / ranks)


def data(rank: int) -> int:
    """The data rank of two times two."""
    return rank // 2


def model(rank: int) -> int:
    """The tensor-parallel rank of two times two."""
    return rank % 2


SPLIT_TOKENS = row("tokens of 4 sequences", TOKENS, 4, share(4))
ALL_TOKENS = row("tokens of 4 sequences", TOKENS, 4)
OWN_SEQUENCES = row("tokens of 4 sequences", TOKENS, 4, own(1))
OWN_PAIR = row("tokens of 4 sequences", TOKENS, 4, own(2, data))

ALL_QUERIES, QUERIES = row("8 query heads", HEADS, 8), row("8 query heads", HEADS, 8, own(2))
HALF_QUERIES = row("8 query heads", HEADS, 8, own(4, model))
WHOLE_PROJECTION = row("output projection", HEADS, 8)
PROJECTION = row("output projection", HEADS, 8, own(2))
HALF_PROJECTION = row("output projection", HEADS, 8, own(4, model))

KEYS = row("pages: 4 key heads", PAGES, 4, own(1))
INDEX = row("pages: index, 8 blocks", PAGES, 8)
OWN_PAGES = row("pages of own sequences", PAGES, 4)
HALF_OWN_PAGES = row("pages of own sequences", PAGES, 4, own(2, model))
SCORED = row("blocks that it scores", PAGES, 8, lambda rank, b: ALL if b % 4 == rank else NONE)

SPLIT_EXPERTS = row("8 experts", EXPERTS, 8, share(4))
OWN_EXPERTS = row("8 experts", EXPERTS, 8, own(2))

ATTENTION = [QUERIES, KEYS, INDEX, PROJECTION]
# A text between rows is an exchange.
LAYOUTS: dict[str, list[Row | str]] = {
    "tp4": [ALL_TOKENS, *ATTENTION, "all-reduce", ALL_TOKENS, SPLIT_EXPERTS, "all-reduce"],
    "tp4,sp": [
        SPLIT_TOKENS,
        "all-gather",
        QUERIES,
        KEYS,
        INDEX,
        "all-to-all: heads for tokens",
        WHOLE_PROJECTION,
        SPLIT_TOKENS,
        "all-gather",
        SPLIT_EXPERTS,
        "reduce-scatter",
    ],
    "tp4,ep": [ALL_TOKENS, *ATTENTION, "all-reduce", ALL_TOKENS, OWN_EXPERTS, "all-reduce"],
    "dep4": [
        OWN_SEQUENCES,
        ALL_QUERIES,
        OWN_PAGES,
        WHOLE_PROJECTION,
        OWN_SEQUENCES,
        "all-gather of tokens, or each to its experts",
        OWN_EXPERTS,
        "reduce-scatter, or each back",
    ],
    "dp2,tp2,ep": [
        OWN_PAIR,
        HALF_QUERIES,
        HALF_OWN_PAGES,
        HALF_PROJECTION,
        "all-reduce between ranks 0, 1 and between 2, 3",
        OWN_PAIR,
        "all-gather between ranks 0, 2 and between 1, 3",
        OWN_EXPERTS,
        "reduce-scatter between 0, 2 and 1, 3, then all-reduce between 0, 1 and 2, 3",
    ],
    "tp4,dcp4": [
        ALL_TOKENS,
        QUERIES,
        KEYS,
        INDEX,
        "index queries to all",
        SCORED,
        "scores of each head to the head's owner, which chooses",
        PROJECTION,
        "all-reduce",
        ALL_TOKENS,
        SPLIT_EXPERTS,
        "all-reduce",
    ],
}


def picture(name: str, steps: list[Row | str]) -> str:
    """The SVG text of a layout."""
    height = TOP + sum(ROW if isinstance(one, Row) else BAND for one in steps) + 8
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(8, 21, name, 'font-size="15" font-weight="bold"'),
    ]
    drawn += [
        _text(_left(r) + COLUMN / 2, 21, f"rank {r}", 'text-anchor="middle"') for r in range(4)
    ]
    y = TOP
    for one in steps:
        drawn += _row(one, y) if isinstance(one, Row) else _band(one, y)
        y += ROW if isinstance(one, Row) else BAND
    return "\n".join([*drawn, "</svg>", ""])


def _row(one: Row, y: float) -> list[str]:
    drawn, width = [_text(8, y + CELLS / 2 + 4, one.name)], COLUMN / one.cells
    for rank in range(4):
        for cell in range(one.cells):
            x, (first, end) = _left(rank) + cell * width, one.held(rank, cell)
            drawn.append(_rect(x, y, width - 2, CELLS, "#eceff1"))
            if end > first:
                top, size = y + first * CELLS, (end - first) * CELLS
                drawn.append(_rect(x, top, width - 2, size, one.colour))
    return drawn


def _band(text: str, y: float) -> list[str]:
    left, right, middle = _left(0), _left(3) + COLUMN - 2, y + BAND / 2 - 7
    return [
        f'<rect x="{left}" y="{middle - 9}" width="{right - left}" height="18" rx="9" '
        'fill="#fff7e0" stroke="#c9a227"/>',
        _text((left + right) / 2, middle + 4, text, 'text-anchor="middle"'),
    ]


def _left(rank: int) -> float:
    return LABEL + GAP + rank * (COLUMN + GAP) - 8


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    size = f'width="{width:.1f}" height="{height:.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{colour}"/>'


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def main() -> None:
    """Writes all pictures."""
    for name, steps in LAYOUTS.items():
        file = Path(__file__).parent / "pictures" / f"{name.replace(',', '_')}.svg"
        file.write_text(picture(name, steps), "utf-8")


if __name__ == "__main__":
    main()
