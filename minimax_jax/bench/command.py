"""`minimax-jax bench`: its flags, its table and its JSON."""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from configs.model import ModelConfig
from configs.parallel import ParallelConfig
from configs.presets import PRESETS
from minimax_jax.bench.layer import CALLS, measure_layer, of_layers
from minimax_jax.bench.mesh import measure_choice, measure_sum
from minimax_jax.bench.prepared import (
    drafted_config,
    layout_of,
    made_drafter,
    made_model,
    memory_text,
)
from minimax_jax.bench.speculation import Speculate, measure_speculation
from minimax_jax.bench.steps import Decode, Measured, measure_decode, measure_prefill
from minimax_jax.drafter import Drafter
from minimax_jax.model import Model
from minimax_jax.quantize import FORMATS
from pallas_kernels import timing
from pallas_kernels.layouts.pool import PoolLayout
from sharding.mesh import make_mesh
from sharding.rules import SERVE, Rules, with_parallel

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
        "--speculative",
        type=float,
        metavar="TOKENS",
        help="verify and draft in place of plain decoding; so many tokens are assumed kept a step",
    )
    what.add_argument(
        "--layer", type=_batch_and_context, nargs="*", default=[], help="one layer, as in 32x32768"
    )
    what.add_argument("--prefill", type=int, nargs="*", default=[16384], help="tokens of a prompt")
    what.add_argument("--chunk", type=int, default=8192, help="tokens of a prefill step")
    what.add_argument("--sum", type=int, nargs="*", default=[], help="tokens summed over ranks")
    what.add_argument(
        "--choice", type=_batch_and_context, nargs="*", default=[], help="one choice of blocks"
    )
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
    report: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    report |= {"layers": len(config.sparse_layers), "parallel": str(parallel)}
    report |= {"limits": limits, "rows": []}
    with jax.set_mesh(mesh):
        started = time.perf_counter()
        for measured in _measured(options, config, parallel):
            row = _row(measured, limits) | {"row_s": time.perf_counter() - started}
            report["rows"].append(row)
            print(_text(measured, row, options), flush=True)
            if options.json is not None:  # each time, as a long run may be ended by force
                options.json.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
            started = time.perf_counter()


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
    rules = with_parallel(SERVE, parallel)
    for tokens in options.sum:
        yield measure_sum(config, options.dtype, tokens)
    for batch, context in options.choice:
        layout = layout_of(of_layers(config, CALLS), options.dtype)
        yield measure_choice(config, rules, layout, batch, context)
    if options.layer:
        model = made_model(of_layers(config, 1), options, rules)
        layout = layout_of(of_layers(config, CALLS), options.dtype)
        for batch, context in options.layer:
            yield measure_layer(model, layout, batch, context)
        del model
    if options.batch or options.prefill:
        yield from _measured_steps(options, config, rules)


def _measured_steps(
    options: argparse.Namespace, config: ModelConfig, rules: Rules
) -> Iterator[Measured]:
    drafted, drafter, committed = None, None, options.speculative
    if committed is not None:
        drafted = drafted_config(options.preset, config, committed)
        drafter = made_drafter(drafted, options)
    layout = layout_of(drafted or config, options.dtype)
    started = time.perf_counter()
    model = made_model(config, options, rules)
    print(memory_text(layout, time.perf_counter() - started), flush=True)
    for batch in options.batch:
        yield _measured_batch(options, model, drafter, layout, batch)
    for tokens in options.prefill:
        yield measure_prefill(model, layout, tokens, options.chunk)


def _measured_batch(
    options: argparse.Namespace,
    model: Model,
    drafter: Drafter | None,
    layout: PoolLayout,
    batch: int,
) -> Measured:
    """With a drafter speculative steps, else plain decoding."""
    place = {"batch": batch, "context": options.context}
    if drafter is None:
        return measure_decode(model, layout, Decode(**place, steps=options.steps))
    case = Speculate(**place, committed=options.speculative)
    return measure_speculation(model, drafter, layout, case)


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
        "first_call_s": measured.first_call,
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
    if row["first_call_s"] is not None:
        parts.append(f"compiled in {row['first_call_s']:.1f} s of {row['row_s']:.1f}")
    lines = [f"{row['name']}: {', '.join(parts)}"]
    lines += [f"  fallback: {one}" for one in measured.fallbacks]
    if options.timeline:
        lines += [
            f"  {us:10.1f} us {count:6.0f} x  {name[:90]}"
            for name, us, count in row["kernels"][:_KERNELS]
        ]
        lines += [f"  gap {us:.1f} us: {a[:40]} -> {b[:40]}" for us, a, b in row["largest_gaps_us"]]
    return "\n".join(lines)
