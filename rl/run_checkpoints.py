"""Training checkpoints by Orbax: the state's arrays and a JSON note beside them, so that a resumed
run is the same run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp


class RunCheckpoints:
    """The checkpoints of one run, by step; use as a context manager, since saving goes on in the
    background.
    """

    def __init__(self, folder: Path, keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)
        self.folder = folder

    def __enter__(self) -> "RunCheckpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()  # waits for what is being written

    @property
    def latest(self) -> int | None:
        """The step of the newest checkpoint, None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, note: Mapping[str, Any]) -> None:
        """Stores a pytree of arrays and a JSON object; a step that is there already is left as it
        is.
        """
        if step == self.latest:
            return
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(state), note=ocp.args.JsonSave(note)
        )
        self._manager.save(step, args=arguments)

    def restore(self, abstract: Any) -> tuple[Any, dict[str, Any]]:
        """The newest state, in the shapes and shardings of `abstract`, and its note.

        Raises ValueError when there is no checkpoint, or it is of another shape.
        """
        step = self.latest
        if step is None:
            raise ValueError(f"{self.folder} holds no checkpoint to resume from")
        note = self._manager.restore(step, args=ocp.args.Composite(note=ocp.args.JsonRestore()))
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        return self._manager.restore(step, args=arguments)["state"], dict(note["note"])


def abstract_like(state: Any) -> Any:
    """Shapes, types and shardings of a state."""
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
