"""`minimax-serve MODEL` on another process than 0: no listener, no engine, only its devices."""

import logging
import os
import signal
from types import FrameType

from rich.console import Console

from serving.command.loading import load_to_follow
from serving.command.progress import StartProgress
from serving.command.resolve import Resolved
from serving.lifetime import SIGNALS
from serving.processes.follower import ENDED_EARLY, Follower
from serving.processes.link import Link

LOG = logging.getLogger(__name__)


def follow(resolved: Resolved, link: Link) -> None:
    """Does what process 0 says until that ends. A signal is passed on to it, which drains; before
    all are ready, a signal ends this process. Raises ValueError with one sentence.
    """
    follower = Follower(link, leave)
    is_ready = False

    def signalled(number: int, frame: FrameType | None) -> None:
        follower.ask_for_end() if is_ready else leave(ENDED_EARLY)

    for number in SIGNALS:
        signal.signal(number, signalled)
    with StartProgress(Console(stderr=True), LOG.debug) as progress:
        try:
            device = load_to_follow(resolved, progress, follower)
        except ValueError as error:
            follower.complain(str(error))
            raise
    is_ready = True
    LOG.info("ready; process 0 answers, and says what runs here")
    follower.follow(device)
    device.close()


def leave(code: int) -> None:
    """Ends at once: a thread may be in a step that never ends."""
    logging.shutdown()
    os._exit(code)
