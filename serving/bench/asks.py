"""A request to be sent: what is said, and how much may be answered."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A part of a prompt, as token ids, as text, or as both; ids are 4 bytes each ("i")."""

    role: Role = "user"
    ids: array | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        assert self.ids is not None or self.text is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """A prompt of segments and the length of its answer; a warm-up is not measured."""

    request_id: str
    segments: Sequence[Segment]
    max_tokens: int | None
    ignore_eos: bool = False
    is_measured: bool = True

    @property
    def ids(self) -> array | None:
        """All segments' ids, one after the other; None where one has only a text."""
        return concatenated(self.segments)

    @property
    def text(self) -> str | None:
        """All segments' texts, likewise."""
        texts = [segment.text for segment in self.segments]
        return None if None in texts else "".join(text or "" for text in texts)


def concatenated(segments: Sequence[Segment]) -> array | None:
    """The ids of segments, likewise."""
    whole = array("i")
    for segment in segments:
        if segment.ids is None:
            return None
        whole.extend(segment.ids)
    return whole
