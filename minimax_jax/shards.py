"""Products on a rank's own part of the weights, and what the ranks send one another around them.

A product whose weight is split along what it sums over gives partial sums. They stay apart, as an
array whose first axis has one entry a rank, until `summed` adds them up: so the parts of a layer
(routed experts and the shared one) are added before anything travels, and it travels in the dtype
of activations, though each rank sums in float32.

With sequence parallelism a rank keeps its own share of every sequence's tokens between the regions
that split heads and hidden widths. `sent` takes activations from one layout to another, as they
are or in MXFP8 (`Rules.transport`); `summed` leaves each rank the sums of its own tokens.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from minimax_jax.layers import Linear, linears
from minimax_jax.lora import Adapter, LowRank
from pallas_kernels.layouts import mxfp8
from sharding.apply import constrain, local, splits
from sharding.axes import MODEL, Axes
from sharding.collectives import exchanged, rank, ranks, scattered_total, total
from sharding.rules import Rules, Transport

Low = Adapter | LowRank  # what a module of several linears takes, and what one takes


def token_axis(num_tokens: int, rules: Rules) -> str | None:
    """The logical axis of so many tokens a sequence between regions: None where all ranks have
    all, since the ranks do not divide them or nothing splits tokens.
    """
    return "tokens" if splits("tokens", num_tokens, rules) else None


def sent(x: Float[Array, "B T D"], axes: Axes, to: Axes, rules: Rules) -> Float[Array, "B T D"]:
    """x, laid out by `axes`, laid out by `to`. Under a quantised transport it is rounded to MXFP8
    where tokens are split, by every rank alike.
    """
    if rules.transport == "exact" or token_axis(x.shape[1], rules) is None:
        return constrain(constrain(x, *axes, rules=rules), *to, rules=rules)
    codes, exponents = mxfp8.encode(constrain(x, *axes, rules=rules))
    parts = (jax.lax.bitcast_convert_type(codes, jnp.uint8), exponents)
    own = (constrain(part, *axes, rules=rules) for part in parts)
    wire, exponents = (constrain(part, *to, rules=rules) for part in own)
    codes = jax.lax.bitcast_convert_type(wire, codes.dtype)
    return mxfp8.decode(codes, exponents).astype(x.dtype)


@jax.named_scope("gathered_tokens")
def gathered_tokens(x: Float[Array, "*rows D"], rules: Rules) -> Float[Array, "*rows D"]:
    """All tokens on every rank, of a stream [B, T, D] of which each may have its own share."""
    if x.ndim < 3:
        return x
    own = ("batch", token_axis(x.shape[1], rules), "embed")
    return sent(x, own, ("batch", None, "embed"), rules)


def by_row(module: Any, x: Float[Array, "*rows D"], rules: Rules) -> tuple[Array, Array]:
    """The two results of `module(x)`, each device those of the rows that it has."""
    tokens = token_axis(x.shape[1], rules) if x.ndim == 3 else None
    rows = ("batch", *[tokens] * (x.ndim - 2))
    return _on_shards(_plain, [(module, None)], x, (*rows, "embed"), [(*rows, None)] * 2, rules)


def columns(
    x: Float[Array, "B T D"], of: Sequence[tuple[Linear, LowRank | None]], rules: Rules
) -> tuple[Float[Array, "B T F"], ...]:
    """What several linears, each with its adapter, make of all tokens: a device its own columns."""
    out = [("batch", None, linear.weight.axes[0]) for linear, _ in of]
    return _on_shards(_linears, list(of), x, ("batch", None, "embed"), out, rules)


@jax.named_scope("of_heads")
def of_heads(
    linear: Linear, heads: Float[Array, "B T NH"], adapter: LowRank | None, rules: Rules
) -> Float[Array, "B T D"]:
    """A projection of what heads attended to: each rank's heads, summed; or, where each rank has
    the whole of it, all heads of its own tokens.
    """
    into = ("batch", token_axis(heads.shape[1], rules), "attended")
    x = sent(heads, ("batch", None, "heads"), into, rules)
    if rules.attended is None:
        out = [(*into[:-1], "embed")]
        return _on_shards(_linears, [(linear, adapter)], x, into, out, rules)[0]
    return summed([partial_sums(linear, x, adapter, into=into, rules=rules)], rules)


def partial_sums(
    module: Any, x: Float[Array, "*rows D"], adapter: Low, *, into: Axes, rules: Rules
) -> Float[Array, "ranks *rows F"]:
    """`module(x, adapter)` of each rank's own weights, whose sum over the ranks is the result."""
    out = ("partials", *into[:-1], "embed")
    return _on_shards(_partial, [(module, adapter)], x, into, out, rules)


def own_rows(table: Float[Array, "V D"], tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Within `local`: the rows of a table of which each rank has a part, every token's sent by the
    rank that has it. Left to the compiler, one token is a slice, and the whole table is gathered
    for it (2.5 GB a step at full size).
    """
    if ranks(MODEL) == 1:
        return table[tokens]
    places = tokens - rank(MODEL) * len(table)
    is_own = (places >= 0) & (places < len(table))
    rows = jnp.where(is_own[..., None], table[jnp.clip(places, 0, len(table) - 1)], 0)
    return total(rows, [MODEL])


def whole_rows(logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """Logits of which each rank has some ids', whole on every rank: what follows, a sampled token
    above all, is then the rank's own business. Left split, every maximum and sum of it travels, and
    a conditional around one is decided by the host.
    """
    return constrain(logits, "batch", None)


@jax.named_scope("summed")
def summed(parts: Sequence[Float[Array, "ranks *rows D"]], rules: Rules) -> Float[Array, "*rows D"]:
    """The sum of partial sums; of its own tokens alone on each rank where tokens are split."""
    shape = parts[0].shape
    rest = (None,) * (len(shape) - 3)
    tokens = token_axis(shape[2], rules) if len(shape) == 4 else None
    add = local(
        partial(_added, is_split=tokens is not None, transport=rules.transport),
        in_axes=[[("partials", "batch", *rest, "embed")] * len(parts)],
        out_axes=("batch", *(tokens for _ in rest), "embed"),
        rules=rules,
    )
    return add(list(parts))


def _added(
    parts: list[Float[Array, "1 *rows D"]], *, is_split: bool, transport: Transport
) -> Float[Array, "*own D"]:
    """What one rank does: adds its parts, then shares of it with the others'."""
    y = sum((part[0] for part in parts[1:]), parts[0][0])
    if not is_split:
        return total(y, [MODEL])
    if transport != "mxfp8_reduce":
        return scattered_total(y, MODEL, dimension=1)
    # Every rank's codes of this rank's tokens; summed in float32 and rounded once.
    codes, exponents = (exchanged(part, MODEL, dimension=1) for part in mxfp8.encode(y))
    return jnp.sum(mxfp8.decode(codes, exponents), axis=0).astype(y.dtype)


def _plain(of: list[tuple[Any, Low]], x: Array) -> Any:
    return of[0][0](x)


def _partial(of: list[tuple[Any, Low]], x: Array) -> Array:
    return of[0][0](x, of[0][1])[None]


def _linears(of: list[tuple[Linear, LowRank | None]], x: Array) -> tuple[Array, ...]:
    return tuple(linears(x, of))


def _on_shards(
    function, of: list[tuple[Any, Any]], x: Array, into: Axes, out: Axes | list[Axes], rules: Rules
) -> Any:
    """`function` of modules with their adapters and of x, all a device's own shards."""
    leaves, tree = jax.tree.flatten(of)
    axes = [one for module, low in of for one in (*_weight_axes(module), *_low_axes(module, low))]
    run = local(
        partial(_unflattened, function, tree), in_axes=[axes, into], out_axes=out, rules=rules
    )
    return run(leaves, x)


def _unflattened(function, tree, leaves: list[Array], x: Array) -> Any:
    return function(jax.tree.unflatten(tree, leaves), x)


def _weight_axes(module: Any) -> list[Axes]:
    """The logical axes of every array of a module's weights, in the order of its leaves."""
    variables = jax.tree.leaves(module, is_leaf=lambda node: isinstance(node, nnx.Param))
    return [one.axes[: leaf.ndim] for one in variables for leaf in jax.tree.leaves(one)]


def _low_axes(module: Any, adapter: Low) -> list[Axes]:
    """The logical axes of an adapter's matrices, in the order of its leaves."""
    if adapter is None:
        return []
    if isinstance(adapter, LowRank):
        out, into = module.weight.axes
        return [(None, into), (out, None)]
    names = sorted(adapter)  # as JAX orders the leaves of a dict
    return [axes for name in names for axes in _low_axes(getattr(module, name), adapter[name])]
