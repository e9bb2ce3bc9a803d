"""The tensor files of a checkpoint folder: which there are, and whether index and headers agree.

The index decides: files that it does not name are not looked at (F04). safetensors only; a folder
that holds nothing but pickled weights is refused.
"""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minimax_jax.checkpoint.tensor_file import CheckpointError, Entry, extent_problems, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(kw_only=True)
class CheckpointFiles:
    """All headers of a checkpoint; `damaged` names the tensors that `problems` speaks of."""

    folder: Path
    entries: dict[str, Entry] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    shards: list[Path] = field(default_factory=list)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; CheckpointError if the file is missing or holds none."""
    if not path.is_file():
        raise CheckpointError(path.parent, [f"there is no {path.name}"])
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise CheckpointError(path.parent, [f"{path.name} is not JSON: {error}"]) from error
    if not isinstance(value, dict):
        raise CheckpointError(path.parent, [f"{path.name} is not a JSON object"])
    return value


def open_files(folder: Path) -> CheckpointFiles:
    """The headers of the shards that the index names, or without an index of `model.safetensors`.

    What is wrong with single shards and tensors is collected in `problems`, so that it can be told
    with everything else; CheckpointError if there is nothing to read at all.
    """
    if not folder.is_dir():
        raise CheckpointError(folder, ["there is no such folder"])
    files = CheckpointFiles(folder=folder)
    if (folder / INDEX).exists():
        _read_indexed(files)
    elif (folder / SINGLE).exists():
        _read_shard(files, folder / SINGLE)
    else:
        raise CheckpointError(folder, [_nothing_to_read(folder)])
    if not files.entries:
        raise CheckpointError(folder, files.problems or ["its files hold no tensors"])
    return files


def _nothing_to_read(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    pickled = [name for name in names if name.endswith(PICKLED)]
    loose = [name for name in names if name.endswith(".safetensors")]
    if loose:
        return f"{loose[0]} is neither {SINGLE} nor named by a {INDEX}"
    if pickled:
        return f"{pickled[0]} would have to be unpickled; only safetensors files are read"
    return f"there is neither {INDEX} nor {SINGLE}"


def _read_indexed(files: CheckpointFiles) -> None:
    weight_map = read_json(files.folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(files.folder, [f"{INDEX} has no weight_map"])
    unreadable = set()
    for shard, count in sorted(Counter(str(shard) for shard in weight_map.values()).items()):
        path = files.folder / shard
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            files.problems.append(
                f"{INDEX} names {shard!r}, which is no safetensors file beside it"
            )
            unreadable.add(shard)
        elif not path.is_file():
            files.problems.append(
                f"{shard}: the index puts {count} tensors here; there is no such file"
            )
            unreadable.add(shard)
        elif not _read_shard(files, path):
            unreadable.add(shard)
    files.damaged |= {name for name, shard in weight_map.items() if shard in unreadable}
    _cross_check(files, weight_map)


def _cross_check(files: CheckpointFiles, weight_map: dict[str, str]) -> None:
    """Index against headers, both ways."""
    for name, shard in weight_map.items():
        entry = files.entries.get(name)
        if name not in files.damaged and (entry is None or entry.file.name != shard):
            sentence = f"{shard}: {name} is put here by the index, but its header lacks it"
            files.problems.append(sentence)
            files.damaged.add(name)
    for name, entry in files.entries.items():
        if name not in weight_map:
            files.problems.append(f"{entry} is in the header, but not in the index")
            files.damaged.add(name)


def _read_shard(files: CheckpointFiles, path: Path) -> bool:
    """Adds a shard's tensors; False if it has no readable header."""
    files.shards.append(path)
    try:
        entries = read_header(path)
    except ValueError as error:
        files.problems.append(f"{path.name}: {error}")
        return False
    for entry in entries:
        if entry.name in files.entries:
            other = files.entries[entry.name].file.name
            files.problems.append(f"{entry} is in {other} as well")
        files.entries[entry.name] = entry
    files.problems += extent_problems(path, entries)
    return True
