"""What the scheduler remembers of a planned row until its result comes."""

from typing import NamedTuple

from serving.scheduling.request import Request


class Row(NamedTuple):
    """A planned row and what it adds: `least` and `most` tokens. `end` is where the keys of a
    chunk end, 0 of a decode row; the last chunk of a prompt `is_last`.
    """

    request: Request
    least: int
    most: int
    end: int = 0
    is_last: bool = True
    drafts: int = 0
