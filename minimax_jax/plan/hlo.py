"""The collectives of a partitioned program, read from its HLO text: what each moves, how often, and
which scope of the model it belongs to.

Bytes are those that a rank sends in a ring: of a whole array of b bytes over n ranks an all-reduce
moves 2 b (n-1)/n, an all-gather and a reduce-scatter b (n-1)/n, an all-to-all b (n-1)/n of the
rank's own b. Types are the logical ones, so the text must be the one before any pass of a backend.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

RAGGED = "ragged-all-to-all"
KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    RAGGED,
    "collective-permute",
)
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+[0-9]+\w*)\[([0-9,]*)\]")
CALLEES = {"call": "to_apply", "while": "body", "fusion": "calls"}
_TRIPS = re.compile(r'known_trip_count[":{n]+"([0-9]+)"')


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of the program, as often as one run of it meets it."""

    kind: str
    scope: str  # the path of the call that made it, such as jit(prefill)/jit(_run_layer)/mlp/psum
    dtype: str
    ranks: int
    nbytes: float  # that one rank sends in all
    row_bytes: float  # of the last axis of the first array


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line of a computation: `%name = type opcode(operands), attributes`."""

    name: str
    type: str
    opcode: str
    rest: str

    @property
    def operands(self) -> list[str]:
        """The names of its operands."""
        return re.findall(r"%([\w.\-]+)", self.rest.split(")", 1)[0])

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Types and sizes of the arrays that it makes."""
        found = _ARRAY.findall(self.type)
        return [(dtype, tuple(int(n) for n in dims.split(",") if n)) for dtype, dims in found]

    def attribute(self, name: str) -> str | None:
        """The computation that an attribute names."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
        return None if found is None else found[1]

    @property
    def op_name(self) -> str:
        """The scope that it was traced in."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return "" if found is None else found[1]

    @property
    def callee(self) -> str | None:
        """The computation that runs in its place, if it is a call, a loop or a fusion."""
        return self.attribute(CALLEES[self.opcode]) if self.opcode in CALLEES else None


Computations = dict[str, list[Instruction]]


def collectives(text: str) -> list[Collective]:
    """Every collective that a run meets, in order. ValueError where one is in a loop whose number
    of rounds is not known.
    """
    computations, entry = computations_of(text)
    return list(_walk(computations, entry, "", 1))


def computations_of(text: str) -> tuple[Computations, str]:
    """The instructions of each computation, and the name of the first that runs."""
    found: Computations = {}
    entry, current = "", []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = found.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif instruction := _INSTRUCTION.match(line):
            name, type_, opcode, rest = instruction.groups()
            current.append(Instruction(name=name, type=type_, opcode=opcode, rest=rest))
    if not entry:
        raise ValueError("the text has no ENTRY computation, so it is no HLO module")
    return found, entry


def _walk(
    computations: Computations, name: str, scope: str, times: int | None
) -> Iterator[Collective]:
    for one in computations[name]:
        kind = collective_kind(one)
        here = f"{scope}/{one.op_name}".strip("/")
        if kind is not None:
            if times is None:
                raise ValueError(f"{kind} of {here} is in a loop of unknown length")
            yield _collective(kind, one, here, times)
        if callee := one.callee:
            yield from _walk(computations, callee, here, rounds(one, computations, times))


def collective_kind(one: Instruction) -> str | None:
    """Which of `KINDS` an instruction is or begins, if any."""
    kind = one.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def rounds(one: Instruction, computations: Computations, times: int | None) -> int | None:
    """How often the called computation runs; None if nothing says it."""
    if one.opcode != "while" or times is None:
        return times
    if known := _TRIPS.search(one.rest):
        return times * int(known[1])
    # A counted loop from 0: its condition compares the counter with the one constant it holds.
    condition = computations.get(one.attribute("condition") or "", [])
    bounds = [c.rest.split(")")[0] for c in condition if c.opcode == "constant"]
    return times * int(bounds[0]) if len(bounds) == 1 and bounds[0].isdigit() else None


def _collective(kind: str, one: Instruction, scope: str, times: int) -> Collective:
    arrays, ranks = one.shapes, _group_size(one.rest)
    nbytes = sum(_width(dtype) * math.prod(sizes) for dtype, sizes in arrays)
    share = (ranks - 1) / ranks
    factor = {
        "all-reduce": 2 * share,
        "reduce-scatter": ranks * share,  # the result is a rank's share alone
        "collective-permute": 1,
    }.get(kind, share)
    dtype, sizes = arrays[0]
    return Collective(
        kind=kind,
        scope=scope,
        dtype=dtype,
        ranks=ranks,
        nbytes=times * nbytes * factor,
        row_bytes=_width(dtype) * sizes[-1] if sizes else _width(dtype),
    )


def _group_size(attributes: str) -> int:
    """Ranks of one group, in each of the three ways that HLO writes them."""
    if listed := re.search(r"replica_groups=\{\{([0-9,]*)\}", attributes):
        return listed[1].count(",") + 1
    if tiled := re.search(r"replica_groups=\[[0-9]+,([0-9]+)\]<=", attributes):
        return int(tiled[1])
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=([0-9]+)", named[1])}
        return math.prod(sizes[name] for name in re.findall(r"'(\w+)'", named[2]))
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", attributes):
        return pairs[1].count("{")
    raise ValueError(f"no ranks in the attributes {attributes[:200]!r} of a collective")


def _width(dtype: str) -> float:
    """Bytes of an element of an HLO type, such as bf16, f8e4m3fn, u8, s4 or pred."""
    if dtype == "pred":
        return 1
    bits = re.match(r"[a-z]+([0-9]+)", dtype)
    assert bits is not None, dtype
    return int(bits[1]) / 8
