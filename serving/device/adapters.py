"""The adapters that rows may name, brought into one form, so that each runs in the same programs.

All have the linears of all of them and the largest rank, zeros where one has less, and their scales
are multiplied into their matrices. Rows without an adapter have one of zeros. Rows of different
adapters run one after the other: a step reads the weights once for each adapter that takes part,
which needs nothing of the model's kernels; rows that gather their own matrices would read them
once, and are worth it only where many adapters decode at the same time.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from minimax_jax.lora import Adapter, LowRank

Path = tuple[str, ...]
Place = Callable[[np.ndarray], jax.Array]  # onto the device


class Adapters:
    """Those of one engine, by name; None is the base model."""

    def __init__(self, named: Mapping[str, Adapter], base: Adapter, place: Place):
        """`base` is what rows without a name run with. Raises ValueError if there are both."""
        if named and base is not None:
            raise ValueError("the model has an adapter of its own, so rows cannot name others")
        self._place, self._form = place, _common_form(named.values())
        zeros = self._fitted({}) if named else base
        self._trees: dict[str | None, Adapter] = {None: zeros}
        self.update(named)

    @property
    def names(self) -> frozenset[str]:
        """What rows may name."""
        return frozenset(name for name in self._trees if name is not None)

    def __getitem__(self, name: str | None) -> Adapter:
        if name not in self._trees:
            raise ValueError(f"adapter {name!r} is not one of {sorted(self.names)}")
        return self._trees[name]

    def update(self, named: Mapping[str, Adapter]) -> None:
        """Sets these; others stay. Raises ValueError for one that the form does not hold."""
        fitted = {}
        for name, adapter in named.items():
            parts = dict(linears(adapter))
            _check(name, parts, self._form)
            fitted[name] = self._fitted(parts)
        self._trees |= fitted

    def _fitted(self, parts: Mapping[Path, LowRank]) -> Adapter:
        """A tree of the common form."""
        tree: dict[str, Any] = {}
        for path, (experts, rank, width, out) in self._form.items():
            a = np.zeros((*experts, rank, width), np.float32)
            b = np.zeros((*experts, out, rank), np.float32)
            if path in parts:
                part = parts[path]
                here = part.a.shape[-2]
                a[..., :here, :] = jax.device_get(part.a)
                b[..., :here] = part.scale * np.asarray(jax.device_get(part.b), np.float32)
            branch = tree
            for name in path[:-1]:
                branch = branch.setdefault(name, {})
            branch[path[-1]] = LowRank(a=self._place(a), b=self._place(b), scale=1.0)
        return tree


# Of each linear: experts (none or one number), rank, width in, width out.
Form = dict[Path, tuple[tuple[int, ...], int, int, int]]


def _form_of(part: LowRank) -> tuple[tuple[int, ...], int, int, int]:
    *of_a, rank, width = part.a.shape
    *of_b, out, _ = part.b.shape
    return np.broadcast_shapes(tuple(of_a), tuple(of_b)), rank, width, out


def _common_form(adapters: Any) -> Form:
    form: Form = {}
    for adapter in adapters:
        for path, part in linears(adapter):
            experts, rank, width, out = _form_of(part)
            known = form.get(path, (experts, 0, width, out))
            form[path] = experts, max(rank, known[1]), width, out
    return form


def linears(adapter: Adapter, path: Path = ()) -> Iterator[tuple[Path, LowRank]]:
    """The parts of an adapter, each with the path to its linear."""
    for name, below in ({} if adapter is None else adapter).items():
        if isinstance(below, LowRank):
            yield (*path, name), below
        else:
            yield from linears(below, (*path, name))


def _check(name: str, parts: Mapping[Path, LowRank], form: Form) -> None:
    for path, part in parts.items():
        where, found = ".".join(path), _form_of(part)
        if path not in form:
            raise ValueError(
                f"adapter {name!r} has a part for {where}, which none had when the engine started"
            )
        experts, rank, width, out = form[path]
        if (found[0], *found[2:]) != (experts, width, out) or found[1] > rank:
            raise ValueError(
                f"adapter {name!r} has shapes {part.a.shape} and {part.b.shape} at {where}, which "
                f"{(*experts, rank, width)} and {(*experts, out, rank)} do not hold"
            )
