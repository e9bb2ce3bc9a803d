"""The form of a matrix in a file is what its tensors are, whatever the config says (spec/model 3):

plain    weight F32 | BF16 | F16
mxfp8    weight F8_E4M3, weight_scale_inv (or weight_scale) U8 | F8_E8M0 per 32 inputs
nvfp4    weight_packed U8, weight_scale F8_E4M3 per 16 inputs, weight_global_scale F32: divides
         weight U8,        weight_scale F8_E4M3 per 16 inputs, weight_scale_2 F32: multiplies
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from minimax_jax.checkpoint.tensor_file import DTYPES, Entry
from minimax_jax.quantize import Form
from pallas_kernels.layouts import mxfp8, nvfp4

PLAIN = tuple(DTYPES[name] for name in ("F32", "BF16", "F16"))
E4M3, BYTE, EXPONENT = DTYPES["F8_E4M3"], DTYPES["U8"], DTYPES["F8_E8M0"]
SUFFIXES = ("packed", "scale", "scale_inv", "global_scale", "scale_2")


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor in its form: values; codes and exponents; or codes, scales and outer scale."""

    form: Form
    parts: tuple[Entry, ...]
    divides: bool = False


def stored_form(name: str, found: Mapping[str, Entry]) -> Stored | str:
    """The form that a matrix's tensors, by suffix, make up; or a sentence why they do not."""
    weight, packed = found.get("weight"), found.get("packed")
    scale, outer = found.get("scale"), [k for k in ("global_scale", "scale_2") if k in found]
    first = next(iter(found.values()))
    if weight is not None and packed is not None:
        return f"{first}: both {name} and {name}_packed are there"
    codes = packed if packed is not None else weight
    if codes is None:
        return f"{first} is there, but {name} is neither in the index nor in any file"
    full = codes.name.removesuffix("_packed")
    if codes.dtype == BYTE:
        fitting = "global_scale" if packed is not None else "scale_2"
        if outer != [fitting]:
            there = " and ".join(f"weight_{suffix}" for suffix in outer) or "no outer scale"
            return (
                f"{codes} is NVFP4 with {there}: only weight_packed with weight_global_scale "
                f"(divides) or weight with weight_scale_2 (multiplies) tell what the scale means"
            )
        if scale is None:
            return f"{codes}: its {full}_scale is neither in the index nor in any file"
        return Stored(
            form="nvfp4", parts=(codes, scale, found[fitting]), divides=packed is not None
        )
    if codes.dtype == E4M3:
        exponents = found.get("scale_inv", scale)
        if exponents is None:
            return f"{codes}: its {full}_scale_inv is neither in the index nor in any file"
        return Stored(form="mxfp8", parts=(codes, exponents))
    if len(found) > 1:
        scales = ", ".join(key for key in found if key != "weight")
        return f"{codes} is {codes.kind}, but has {scales} beside it"
    if codes.dtype not in PLAIN:
        return f"{codes} has dtype {codes.kind}, expected BF16, F16, F32, F8_E4M3 or packed U8"
    return Stored(form="plain", parts=(codes,))


def shape_problems(stored: Stored, shape: tuple[int, ...], path: str) -> list[str]:
    """Parts whose shape or dtype is not that of a matrix of this shape in this form."""
    *rows, width = shape
    if stored.form == "plain":
        wanted = [(shape, PLAIN)]
    elif stored.form == "mxfp8":
        scales = (*rows, -(-width // mxfp8.GROUP))
        wanted = [(shape, (E4M3,)), (scales, (BYTE, EXPONENT))]
    else:
        halves, scales = (*rows, width // 2), (*rows, -(-width // nvfp4.GROUP))
        wanted = [(halves, (BYTE,)), (scales, (E4M3,))]
    problems = [
        f"{entry} is {entry.kind}, expected {list(want)} for {path}"
        for entry, (want, dtypes) in zip(stored.parts, wanted, strict=False)
        if entry.shape != want or entry.dtype not in dtypes
    ]
    group = {"mxfp8": mxfp8.GROUP, "nvfp4": nvfp4.GROUP}.get(stored.form, 1)
    if width % group:
        problems.append(f"{stored.parts[0]}: {width} inputs are no whole groups of {group}")
    if stored.form == "nvfp4":
        outer, matrices = stored.parts[2], math.prod(shape[:-2])
        if outer.dtype != DTYPES["F32"] or math.prod(outer.shape) != matrices:
            problems.append(f"{outer} is {outer.kind}, expected {matrices} F32 for {path}")
    return problems
