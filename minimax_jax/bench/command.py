"""`minimax-jax bench`: its flags, its table and its JSON."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from configs.model import ModelConfig
from configs.parallel import ParallelConfig
from configs.presets import PRESETS
from minimax_jax.bench.layer import CALLS, measure_layer, of_layers
from minimax_jax.bench.steps import Decode, Measured, measure_decode, measure_prefill
from minimax_jax.cache import formats_of, local_heads, pool_layout
from minimax_jax.model import Model
from minimax_jax.quantize import FORMATS
from minimax_jax.random_model import random_model
from pallas_kernels import timing
from pallas_kernels.layouts.pool import PoolLayout
from sharding.mesh import make_mesh
from sharding.rules import SERVE, with_parallel

_KERNELS = 25  # names of a timeline that are printed
_GAPS = 3


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Gives the command its flags."""
    parser.set_defaults(run=_bench)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="m3_1_flash")
    parser.add_argument("--layers", type=int, help="only so many; by default all")
    parser.add_argument("--weights", choices=FORMATS, default="m3.1", help="their stored form")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    parser.add_argument("--parallel", default="tp1", help="such as tp2 or tp2,ep; by default tp1")
    what = parser.add_argument_group("what is run (several numbers: one run of each)")
    what.add_argument("--batch", type=int, nargs="*", default=[1, 32], help="sequences decoded")
    what.add_argument("--context", type=int, default=8192, help="tokens of each")
    what.add_argument("--steps", type=int, default=1, help="tokens of each a dispatch")
    what.add_argument(
        "--layer", type=_batch_and_context, nargs="*", default=[], help="one layer, as in 32x32768"
    )
    what.add_argument("--prefill", type=int, nargs="*", default=[16384], help="tokens of a prompt")
    what.add_argument("--chunk", type=int, default=8192, help="tokens of a prefill step")
    parser.add_argument("--timeline", action="store_true", help="print the time of every kernel")
    parser.add_argument("--json", type=Path, help="where to write all figures")


def _bench(options: argparse.Namespace) -> None:
    for name in ("layers", "context", "steps", "chunk"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} is not at least 1")
    parallel = ParallelConfig.parse(options.parallel)
    config = shortened(PRESETS[options.preset](), options.layers)
    mesh, limits = make_mesh(parallel), device_limits()
    if options.layer and mesh.size > 1:
        raise ValueError(f"--layer is measured on one device, and {parallel} has {mesh.size}")
    print(_head(options, config, limits), flush=True)
    rows = []
    with jax.set_mesh(mesh):
        for measured in _measured(options, config, parallel):
            rows.append(_row(measured, limits))
            print(_text(measured, rows[-1], options), flush=True)
    if options.json is not None:
        report = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        report |= {"layers": len(config.sparse_layers), "parallel": str(parallel)}
        report |= {"limits": limits, "rows": rows}
        options.json.write_text(json.dumps(report, indent=2) + "\n", "utf-8")


def device_limits() -> dict[str, float] | None:
    """What this device does, a second; None off a GPU, where both would take minutes."""
    if jax.default_backend() != "gpu":
        return None
    return {"bytes": timing.copy_bandwidth(), "flops": timing.gemm_rate()}


def shortened(config: ModelConfig, layers: int | None) -> ModelConfig:
    """The first layers of a model, without its drafter. ValueError if it has fewer."""
    known = len(config.sparse_layers)
    if layers is not None and layers > known:
        raise ValueError(f"layers={layers}, but the model has {known}")
    kept = slice(known if layers is None else layers)
    sparse, moe = config.sparse_layers[kept], config.moe_layers[kept]
    return replace(config, sparse_layers=sparse, moe_layers=moe, drafter=None)


def _batch_and_context(text: str) -> tuple[int, int]:
    batch, _, context = text.partition("x")
    if not (batch.isdecimal() and context.isdecimal() and int(batch) and int(context)):
        raise argparse.ArgumentTypeError(f"{text!r} is no batch x context, as in 32x32768")
    return int(batch), int(context)


def _measured(
    options: argparse.Namespace, config: ModelConfig, parallel: ParallelConfig
) -> Iterator[Measured]:
    if options.layer:
        model, _ = _prepared(options, of_layers(config, 1), parallel)
        layout = _layout(options, of_layers(config, CALLS))
        for batch, context in options.layer:
            yield measure_layer(model, layout, batch, context)
        del model
    if options.batch or options.prefill:
        yield from _measured_steps(options, *_prepared(options, config, parallel))


def _measured_steps(
    options: argparse.Namespace, model: Model, layout: PoolLayout
) -> Iterator[Measured]:
    for batch in options.batch:
        case = Decode(batch=batch, context=options.context, steps=options.steps)
        yield measure_decode(model, layout, case)
    for tokens in options.prefill:
        yield measure_prefill(model, layout, tokens, options.chunk)


def _prepared(
    options: argparse.Namespace, config: ModelConfig, parallel: ParallelConfig
) -> tuple[Model, PoolLayout]:
    """A random model on the devices, and the layout of its pages."""
    rules, mesh = with_parallel(SERVE, parallel), jax.sharding.get_mesh()
    how = {"seed": options.seed, "mesh": mesh, "rules": rules}
    model = random_model(config, options.dtype, options.weights, **how)
    return jax.block_until_ready(model), _layout(options, config)


def _layout(options: argparse.Namespace, config: ModelConfig) -> PoolLayout:
    """Of the pages of a rank of the current mesh."""
    plain = {"float32": "f32", "bfloat16": "bf16"}[options.dtype]
    return pool_layout(
        config, formats_of(config, plain), local_heads(config, jax.sharding.get_mesh())
    )


def _row(measured: Measured, limits: dict[str, float] | None) -> dict[str, Any]:
    limit, timeline = None, measured.timeline
    if limits is not None:
        limit = max(measured.bytes / limits["bytes"], measured.flops / limits["flops"])
    return {
        "name": measured.name,
        "ms": measured.seconds * 1e3,
        "tokens_a_second": measured.tokens_a_second,
        "bytes": measured.bytes,
        "flops": measured.flops,
        "limit_ms": None if limit is None else limit * 1e3,
        "share_of_limit": None if limit is None else limit / measured.seconds,
        "launches": timeline.launches,
        "busy_ms": timeline.busy_us / 1e3,
        "largest_gaps_us": timeline.gaps[:_GAPS],
        "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        "kernels": timeline.by_name,
        "fallbacks": measured.fallbacks,
    }


def _head(options: argparse.Namespace, config: ModelConfig, limits: dict[str, float] | None) -> str:
    text = (
        f"{options.preset}, {len(config.sparse_layers)} layers of random {options.weights} "
        f"weights, {options.parallel} on {jax.devices()[0].device_kind}, JAX {jax.__version__}"
    )
    if limits is None:
        return text
    copy, gemm = limits["bytes"] / 1e12, limits["flops"] / 1e12
    return f"{text}; copy {copy:.2f} TB/s, GEMM {gemm:.0f} TFLOP/s"


def _text(measured: Measured, row: dict[str, Any], options: argparse.Namespace) -> str:
    parts = [f"{row['ms']:.3f} ms a step", f"{row['tokens_a_second']:.1f} tokens/s"]
    if row["limit_ms"] is not None:
        parts.append(f"limit {row['limit_ms']:.3f} ms ({row['share_of_limit']:.0%})")
    if measured.timeline.kernels:
        parts += [f"{row['launches']:.0f} launches", f"kernels busy {row['busy_ms']:.3f} ms"]
    if row["peak_bytes"] is not None:
        parts.append(f"peak memory {row['peak_bytes'] / 1e9:.1f} GB")
    lines = [f"{row['name']}: {', '.join(parts)}"]
    lines += [f"  fallback: {one}" for one in measured.fallbacks]
    if options.timeline:
        lines += [
            f"  {us:10.1f} us {count:6.0f} x  {name[:90]}"
            for name, us, count in row["kernels"][:_KERNELS]
        ]
        lines += [f"  gap {us:.1f} us: {a[:40]} -> {b[:40]}" for us, a, b in row["largest_gaps_us"]]
    return "\n".join(lines)
