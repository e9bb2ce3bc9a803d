"""A `StartProfileRequest` as a profile: into a folder that the server's owner allows."""

from pathlib import Path
from typing import Any

import grpc

from serving.engine_api import Profile
from serving.rpc.statuses import Refused

ACTIVITIES = {"CPU", "GPU", "TPU"}  # which JAX's profiler always records together
_NOT_OURS = ("record_shapes", "profile_by_stage")


def profile(message: Any, allowed: str | None) -> Profile:
    """What is to be profiled. Raises Refused where no folder is allowed, and ValueError."""
    if allowed is None:
        text = "profiling is off: the server was started without profile_dir"
        raise Refused(grpc.StatusCode.FAILED_PRECONDITION, text)
    others = sorted(set(message.activities) - ACTIVITIES)
    if others:
        raise ValueError(f"activities={others} are not among {', '.join(sorted(ACTIVITIES))}")
    for name in _NOT_OURS:
        if getattr(message, name):
            raise ValueError(f"{name} is not supported by JAX's profiler")
    if message.start_step < 0:
        raise ValueError(f"start_step={message.start_step} is negative")
    if message.HasField("num_steps") and message.num_steps < 1:
        raise ValueError(f"num_steps={message.num_steps} is not at least 1")
    return Profile(
        folder=_folder(message.output_dir, Path(allowed)),
        start_step=message.start_step,
        num_steps=message.num_steps if message.HasField("num_steps") else None,
        with_python=message.with_stack,
    )


def _folder(wanted: str, allowed: Path) -> str:
    """The folder asked for, which a client may name only below the allowed one."""
    try:
        folder = (allowed / wanted).resolve()
    except (OSError, ValueError) as error:
        raise ValueError(f"output_dir={wanted!r} is no path: {error}") from error
    if not folder.is_relative_to(allowed.resolve()):
        raise ValueError(f"output_dir={wanted!r} is not below the server's profile_dir")
    return str(folder)
