"""How many devices share the model, and along which lines.

devices = dp x tp. `ep` spreads whole experts over all devices (1 or dp x tp), `dcp` divides `tp`
and reuses its ranks for long contexts: they share the scoring of a context and, with `split`, its
pages. `sp` splits the tokens between the tensor-parallel regions.
`overlap` runs a prefill chunk as two halves whose layers alternate, so that one half computes while
the ranks exchange what the other made.

One grammar everywhere, items joined by commas: `dpN`, `tpN`, `dcpN`, the switches `ep`, `sp`,
`overlap` and `split`, and two short forms: `depN` is dp N with ep N, `epN` is tp N with ep N.
Examples: `tp4`, `tp4,sp`, `tp2,ep`, `dep4`, `tp4,dcp4`, `tp8,dcp2,split`. What `sp` exchanges
travels as it is (`exact`, the default), or in MXFP8: `tp4,sp,mxfp8` everything but the sums,
`tp4,sp,mxfp8_reduce` the sums too.
"""

import re
from dataclasses import dataclass
from typing import Literal, Self, get_args

Transport = Literal["exact", "mxfp8", "mxfp8_reduce"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
GRAMMAR = (
    "dpN, tpN, dcpN, depN, epN, ep, sp, overlap, after dcpN split and, after sp, mxfp8 or "
    "mxfp8_reduce, joined by commas, such as 'tp4,sp'"
)
# What a sized item sets; `ep` of the short forms follows from them.
SIZES = {"dp": "dp", "tp": "tp", "dcp": "dcp", "dep": "dp", "ep": "tp"}


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the five kinds of parallelism; see the module's docstring."""

    dp: int = 1  # data-parallel replicas
    tp: int = 1  # tensor-parallel ranks
    ep: int = 1  # expert-parallel ranks: 1 or dp x tp
    dcp: int = 1  # context-parallel ranks in decode, among the tp ranks
    sp: bool = False  # tokens split over tp outside the tensor-parallel regions
    transport: Transport = "exact"  # how activations travel that sp exchanges
    overlap: bool = False  # two alternating halves of a prefill chunk
    split: bool = False  # each dcp rank stores a part of every context

    def __post_init__(self):
        for name in ("dp", "tp", "ep", "dcp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not a positive number of ranks")
        if self.ep not in (1, self.num_devices):
            raise ValueError(
                f"ep={self.ep} is neither 1 nor dp x tp = {self.dp} x {self.tp} = "
                f"{self.num_devices}"
            )
        if self.tp % self.dcp:
            raise ValueError(f"dcp={self.dcp} does not divide tp={self.tp}")
        if self.sp and self.tp == 1:
            raise ValueError("sp splits tokens over the tp ranks, but tp=1")
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport={self.transport!r} is none of {', '.join(TRANSPORTS)}")
        if self.transport != "exact" and not self.sp:
            raise ValueError(f"transport={self.transport} is of what sp exchanges, but sp is off")
        if self.split and self.dcp == 1:
            raise ValueError("split shares a context's pages among the dcp ranks, but dcp=1")
        if self.overlap and self.tp == 1 and self.ep == 1:
            raise ValueError(
                "overlap hides what ranks exchange, but tp=1 and ep=1 exchange nothing"
            )

    @property
    def num_devices(self) -> int:
        return self.dp * self.tp

    @property
    def page_ranks(self) -> int:
        """Among how many ranks the pages of a context are shared out."""
        return self.dcp if self.split else 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads the grammar of the module's docstring; `ValueError` says what does not fit."""
        sizes: dict[str, int] = {}
        switches: set[str] = set()
        transports: list[Transport] = []
        for item in text.replace(" ", "").split(","):
            if item in TRANSPORTS:
                transports.append(TRANSPORTS[TRANSPORTS.index(item)])
                continue
            match = re.fullmatch(r"(dp|tp|dcp|dep|ep)([0-9]+)|(ep|sp|overlap|split)", item)
            if match is None:
                raise ValueError(f"{item!r} in {text!r} is none of {GRAMMAR}")
            kind, size, switch = match.groups()
            name = switch or SIZES[kind]
            if name in sizes or name in switches:
                raise ValueError(f"{item!r} in {text!r} sets {name} a second time")
            if switch:
                switches.add(switch)
            else:
                sizes[name] = int(size)
                sizes |= {"ep": int(size)} if kind in ("dep", "ep") else {}
        if "ep" in switches:
            sizes["ep"] = sizes.get("dp", 1) * sizes.get("tp", 1)
        if len(transports) > 1:
            raise ValueError(f"{text!r} names the transports {' and '.join(transports)}")
        return cls(
            **sizes,
            sp="sp" in switches,
            overlap="overlap" in switches,
            split="split" in switches,
            transport=(transports or ["exact"])[0],
        )

    def __str__(self) -> str:
        """The shortest text without short forms that `parse` reads back."""
        sizes = {"dp": self.dp, "tp": self.tp, "dcp": self.dcp}
        items = [f"{name}{size}" for name, size in sizes.items() if size > 1] or ["tp1"]
        items += ["split"] if self.split else []
        items += ["ep"] if self.ep > 1 else []
        items += ["sp"] if self.sp else []
        items += [self.transport] if self.transport != "exact" else []
        items += ["overlap"] if self.overlap else []
        return ",".join(items)
