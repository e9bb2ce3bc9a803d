"""What the load generator needs of a way to a server."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from serving.bench.answers import Answer
from serving.bench.asks import Ask


class AskError(RuntimeError):
    """A request failed, for the reason in the text."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a server says of itself; None where its protocol does not."""

    model: str
    max_model_len: int | None = None
    vocab_size: int | None = None
    stop_ids: Sequence[int] = ()
    block_size: int | None = None


class Client(Protocol):
    """One way to one server, for many requests at a time."""

    async def facts(self) -> Facts:
        """What it is. Raises AskError when it does not answer."""
        ...

    async def ask(self, ask: Ask, answer: Answer) -> None:
        """Sends a request and fills the answer in as it comes. Raises AskError; a cancelled call
        is cancelled at the server too.
        """
        ...

    async def flush(self) -> None:
        """Drops the server's prefix cache. Raises AskError when it does not."""
        ...

    async def close(self) -> None:
        """Closes the connections."""
        ...
