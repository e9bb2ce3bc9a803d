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

    def note(self) -> dict[str, Any]:
        """The newest checkpoint's note. Raises ValueError when there is no checkpoint."""
        if self.latest is None:
            raise ValueError(f"{self.folder} holds no checkpoint to resume from")
        arguments = ocp.args.Composite(note=ocp.args.JsonRestore())
        return dict(self._manager.restore(self.latest, args=arguments)["note"])

    def restore(self, abstract: Any) -> tuple[Any, dict[str, Any]]:
        """The newest state, in the shapes and shardings of `abstract`, and its note.

        Raises ValueError when there is no checkpoint, or it is of another shape.
        """
        note = self.note()
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        return self._manager.restore(self.latest, args=arguments)["state"], note


def abstract_like(state: Any) -> Any:
    """Shapes, types and shardings of a state."""
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
