"""Which slices of an array the devices of this process keep, and which are read together."""

from dataclasses import dataclass
from typing import Any

from jax.sharding import Sharding

Bounds = tuple[tuple[int, int], ...]  # first and end along each dimension


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What is read at once, and the cut of it that each device keeps."""

    bounds: Bounds
    kept: list[tuple[Any, tuple[slice, ...]]]  # device, slices of what is read


def readings(sharding: Sharding, shape: tuple[int, ...], least_columns: int) -> list[Reading]:
    """Each slice once, however many devices keep it; and those that differ by their columns alone
    as one, where they have fewer than `least_columns`, since whole rows are read for them anyway.
    """
    groups: dict[Bounds, list[tuple[Any, Bounds]]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        cuts = zip(index or (), shape, strict=True)
        bounds = tuple(cut.indices(size)[:2] for cut, size in cuts)
        is_narrow = bool(bounds) and bounds[-1][1] - bounds[-1][0] < least_columns
        groups.setdefault(bounds[:-1] if is_narrow else bounds, []).append((device, bounds))
    return [_reading(group) for group in groups.values()]


def _reading(group: list[tuple[Any, Bounds]]) -> Reading:
    """The smallest box that holds all bounds of a group."""
    sides = list(zip(*(bounds for _, bounds in group), strict=True))
    box = tuple((min(a for a, _ in side), max(b for _, b in side)) for side in sides)
    kept = []
    for device, bounds in group:
        ends = zip(bounds, box, strict=True)
        cut = tuple(slice(first - start, end - start) for (first, end), (start, _) in ends)
        kept.append((device, cut))
    return Reading(bounds=box, kept=kept)
