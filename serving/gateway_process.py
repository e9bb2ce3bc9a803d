"""The gateway's own process: the console script of the package `smg`, which ends when we do.

Run by path, since it needs nothing of this project. The arguments come as a JSON line on standard
input, because keys among them would show in the list of processes; its end means that our process
is gone, however it died.
"""

import json
import os
import signal
import sys
import threading
import time
from importlib.metadata import entry_points

PATIENCE_S = 5.0  # for the gateway to end by itself


def main() -> None:
    """Runs `smg` with the arguments."""
    arguments = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    [script] = entry_points(group="console_scripts", name="smg")
    sys.argv = ["smg", *arguments]
    script.load()()


def _end_with_parent() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE_S)
    os._exit(1)


if __name__ == "__main__":
    main()
