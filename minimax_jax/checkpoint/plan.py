"""What a checkpoint's headers say about each leaf of a model: where it is, in which form, and all
that is wrong, found before any parameter exists.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from minimax_jax import names
from minimax_jax.checkpoint.files import CheckpointFiles
from minimax_jax.checkpoint.stored import SUFFIXES, Stored, shape_problems, stored_form
from minimax_jax.checkpoint.tensor_file import Entry
from minimax_jax.names import Place
from minimax_jax.quantize import Form, is_expert, is_projection, is_router

SHOWN_NAMES = 3
KnownPart = Callable[[str], str | None]


@dataclass(frozen=True, kw_only=True)
class LeafPlan:
    """Where one parameter of the model comes from: one tensor, or one an expert."""

    path: str
    shape: tuple[int, ...]
    place: Place
    tensors: tuple[Stored, ...]

    @property
    def form(self) -> Form:
        """The form that the leaf has in memory."""
        return self.tensors[0].form

    @property
    def divides(self) -> bool:
        """Whether an NVFP4 leaf's outer scale divides."""
        return self.tensors[0].divides


@dataclass(kw_only=True)
class Plan:
    """All leaves of a model, the tensors that are known but not loaded, and what is wrong."""

    leaves: list[LeafPlan] = field(default_factory=list)
    known: list[Entry] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def make_plan(
    files: CheckpointFiles,
    shapes: Mapping[str, tuple[int, ...]],
    known_part: KnownPart = names.known_part,
) -> Plan:
    """The plan of a model whose parameters have these paths and shapes; problems are collected.

    `known_part` names the part of a tensor that may be there and is not loaded.
    """
    plan, search = Plan(problems=list(files.problems)), _Search(files, known_part)
    plan.leaves = [leaf for path, shape in shapes.items() if (leaf := search.leaf(path, shape))]
    plan.known = [entry for entry in files.entries.values() if known_part(entry.name)]
    expected = search.used | files.damaged | {entry.name for entry in plan.known}
    unknown = [entry for name, entry in files.entries.items() if name not in expected]
    plan.problems += search.problems
    missing, unknown = _name_expert_layout(plan, search.missing, unknown)
    plan.problems += [_missing(path, shapes[path]) for path in missing]
    plan.problems += [f"{entry} ({entry.kind}) is no tensor of this model" for entry in unknown]
    plan.problems += _cache_scale_problems(plan.known)
    return plan


def _name_expert_layout(
    plan: Plan, missing: list[str], unknown: list[Entry]
) -> tuple[list[str], list[Entry]]:
    """One line in place of hundreds if the experts are stored in a layout of another kind (F10)."""
    lost = [path for path in missing if is_expert(path)]
    foreign = [entry for entry in unknown if names.EXPERT_NAME.search(entry.name)]
    if not lost or not foreign:
        return missing, unknown
    layouts = sorted({names.NUMBER.sub("{i}", entry.name) for entry in foreign})
    wanted = names.add_prefix(names.released_place(lost[0]).name)
    plan.problems.append(
        f"the experts are stored as {', '.join(layouts[:SHOWN_NAMES])} ({len(foreign)} tensors): "
        f"this layout is not supported, {names.NUMBER.sub('{i}', wanted)} is"
    )
    return [p for p in missing if p not in lost], [e for e in unknown if e not in foreign]


def _cache_scale_problems(known: Iterable[Entry]) -> list[str]:
    """Cache scales other than 1, which the page pool's outer scale is: they would do nothing."""
    problems = []
    for entry in known:
        if names.known_part(entry.name) == "cache scale":
            values = entry.read().astype(np.float64).reshape(-1)
            if not np.all(values == 1):
                sentence = (
                    f"{entry} is {values.tolist()}, but the cache's outer scale is 1.0, always"
                )
                problems.append(sentence)
    return problems


class _Found(NamedTuple):
    """Whether anything of a tensor is there, and what, if nothing is wrong with it."""

    there: bool
    stored: Stored | None


class _Search:
    """Looks leaves up among the tensors of a checkpoint; notes what is used, missing and wrong."""

    def __init__(self, files: CheckpointFiles, known_part: KnownPart):
        self.entries: dict[str, Entry] = {}
        self.used: set[str] = set()
        self.missing: list[str] = []
        self.problems: list[str] = []
        self.damaged = {names.strip_prefix(name) for name in files.damaged}
        for entry in files.entries.values():
            name = names.strip_prefix(entry.name)
            if name is None or known_part(entry.name):
                continue
            if name in self.entries:
                self.problems.append(f"{entry} and {self.entries[name]} are the same parameter")
                self.used.add(self.entries[name].name)
            self.entries[name] = entry

    def leaf(self, path: str, shape: tuple[int, ...]) -> LeafPlan | None:
        """The leaf's plan; None if it is missing or something is wrong, which is noted then."""
        for place in names.places(path):
            tensors = place.names(shape[0])
            found = [self._find(name, path) for name in tensors]
            if any(there for there, _ in found):
                self._note_absent(tensors, found, path)
                return self._checked(path, shape, place, [stored for _, stored in found])
        self.missing.append(path)
        return None

    def _checked(
        self, path: str, shape: tuple[int, ...], place: Place, found: list[Stored | None]
    ) -> LeafPlan | None:
        good = [stored for stored in found if stored is not None]
        expected = _file_shape(place, shape)
        wrong = [p for stored in good for p in shape_problems(stored, expected, path)]
        if len({(stored.form, stored.divides) for stored in good}) > 1:
            forms = " and ".join(sorted({stored.parts[0].kind for stored in good}))
            wrong.append(f"{good[0].parts[0]}: {path} is stored in several forms, {forms}")
        self.problems += wrong
        if wrong or len(good) < len(found):
            return None
        return LeafPlan(path=path, shape=shape, place=place, tensors=tuple(good))

    def _note_absent(self, tensors: list[str], found: list[_Found], path: str) -> None:
        absent = [name for name, (there, _) in zip(tensors, found, strict=True) if not there]
        if absent:
            some = ", ".join(names.add_prefix(name) for name in absent[:SHOWN_NAMES])
            dots = ", ..." if len(absent) > SHOWN_NAMES else ""
            self.problems.append(
                f"{len(absent)} of the {len(tensors)} tensors of {path} are neither in the index "
                f"nor in any file: {some}{dots}"
            )

    def _find(self, name: str, path: str) -> _Found:
        """A tensor with its scales."""
        all_names = {"weight": name}
        if name.endswith(".weight"):
            all_names |= {suffix: f"{name}_{suffix}" for suffix in SUFFIXES}
        present = {k: self.entries[n] for k, n in all_names.items() if n in self.entries}
        self.used.update(entry.name for entry in present.values())
        if self.damaged.intersection(all_names.values()):
            return _Found(True, None)
        if not present:
            return _Found(False, None)
        stored = stored_form(name, present)
        if isinstance(stored, Stored) and stored.form != "plain" and not _may_be_quantized(path):
            stored = f"{stored.parts[0]} is stored as {stored.form}, but {path} has to be plain"
        if isinstance(stored, str):
            self.problems.append(stored)
            return _Found(True, None)
        return _Found(True, stored)


def _missing(path: str, shape: tuple[int, ...]) -> str:
    place = names.released_place(path)
    full = names.add_prefix(place.name.replace("{e}", f"0..{shape[0] - 1}"))
    return f"{full} {list(_file_shape(place, shape))} is neither in the index nor in any file"


def _file_shape(place: Place, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a place's tensors for a leaf of this shape."""
    if place.layout == "per expert":
        return shape[1:]
    if place.layout == "whole":
        return shape
    *outer, rows, columns = shape
    return (*outer, 2 * rows, columns)


def _may_be_quantized(path: str) -> bool:
    return not is_router(path) and (is_expert(path) or is_projection(path) or path == "head.weight")
