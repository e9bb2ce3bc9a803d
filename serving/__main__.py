"""The command `minimax-serve`: `minimax-serve MODEL` serves, `minimax-serve bench` measures it,
`minimax-serve profile` what its steps cost.
"""

import asyncio
import os
import sys
from collections.abc import Sequence

import jax

from minimax_jax.compiled import keep_compiled_programs
from serving import logs
from serving.bench.command import main as bench
from serving.command.flags import PROGRAM, parse
from serving.command.resolve import Machine, resolve
from serving.command.run import ENDED_EARLY, serve
from serving.profile_costs import main as profile

OTHERS = {"bench": bench, "profile": profile}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs it. A user's mistake is one sentence on standard error and exit code 2; a start that
    fails, or an engine that does, is one sentence and 1.
    """
    arguments = sys.argv[1:] if arguments is None else [*arguments]
    if arguments and arguments[0] in OTHERS:
        OTHERS[arguments[0]](arguments[1:])
        return
    try:
        asked = parse(arguments)
        logs.set_up(asked.monitoring)
        machine = Machine(platform=jax.default_backend(), num_devices=jax.device_count())
        resolved = resolve(asked, machine)
    except (ValueError, OSError) as error:
        _end(error, 2)
    keep_compiled_programs()
    try:
        code = asyncio.run(serve(resolved))
    except (ValueError, OSError) as error:
        _end(error, 1)
    if code == ENDED_EARLY:
        os._exit(code)  # a thread still compiles, which cannot be interrupted
    sys.exit(code)


def _end(error: Exception, code: int) -> None:
    print(f"{PROGRAM}: {error}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
