"""What the scheduler remembers of a planned row until its result comes."""

from typing import TypeAlias

from serving.scheduling.request import Request

# A sequence, the least and the most tokens that the row adds, where the keys of a chunk end (0 of a
# decode row), whether it is the last chunk of its prompt or none, and the drafts that are tested. A
# plain tuple, since there is one of each running sequence in each step.
Row: TypeAlias = tuple[Request, int, int, int, bool, int]
