"""`minimax-jax plan`: what a layout sends, holds and computes, from a config alone."""

import argparse
import json
from dataclasses import asdict, replace

import jax
from rich.console import Console
from rich.table import Table

from configs.parallel import TRANSPORTS, ParallelConfig
from configs.presets import PRESETS
from minimax_jax.plan import Plan, Sent, plan
from minimax_jax.plan.program import PHASES, Step
from minimax_jax.quantize import FORMATS

GB = 10**9


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Gives the command its flags."""
    parser.set_defaults(run=_plan)
    parser.add_argument("--preset", choices=PRESETS, default="m3_1_flash", help="a model's shape")
    parser.add_argument("--parallel", required=True, help="such as tp4, tp4,sp or dep4")
    parser.add_argument("--phase", choices=PHASES, default="prefill")
    parser.add_argument(
        "--transport", choices=TRANSPORTS, help="of what sp exchanges (default exact)"
    )
    parser.add_argument("--weights", choices=FORMATS, default="m3.1", help="format of the weights")
    size = parser.add_argument_group("the step that is compiled")
    size.add_argument("--batch", type=int, help="sequences a data rank (1, or 32 in decode)")
    size.add_argument("--tokens", type=int, help="tokens of each sequence (2048, or 1 in decode)")
    size.add_argument("--context", type=int, default=8192, help="tokens a sequence has pages for")
    size.add_argument("--layers", type=int, default=2, help="how many, of the last layer's kind")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def _plan(options: argparse.Namespace) -> None:
    parallel = ParallelConfig.parse(options.parallel)
    if options.transport is not None:
        parallel = replace(parallel, transport=options.transport)
    is_prefill = options.phase == "prefill"
    step = Step(
        config=PRESETS[options.preset](),
        parallel=parallel,
        phase=options.phase,
        batch=_given(options.batch, 1 if is_prefill else 32),
        tokens=_given(options.tokens, 2048 if is_prefill else 1),
        context=options.context,
        weights=options.weights,
        layers=options.layers,
    )
    _fake_devices(parallel.num_devices)
    found = plan(step)
    if options.json:
        print(json.dumps({"preset": options.preset} | plan_json(found)))
    else:
        print_plan(options.preset, found, Console(highlight=False))


def _given(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def _fake_devices(count: int) -> None:
    """As many CPU devices as the mesh needs, unless JAX has begun with others already."""
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # the backend has started; `make_mesh` says if its devices are too few
        return


def plan_json(found: Plan) -> dict[str, object]:
    """The plan as plain values, bytes of one rank."""
    step = found.step
    return {
        "parallel": str(step.parallel),
        "transport": step.parallel.transport,
        "phase": step.phase,
        "batch": step.batch,
        "tokens": step.tokens,
        "context": step.context,
        "layers_compiled": step.layers,
        "collectives": [asdict(sent) for sent in found.in_layer],
        "once_a_step": [asdict(sent) for sent in found.once],
        "collective_bytes_per_token_layer_rank": found.bytes_per_token_layer,
        "weight_bytes": {part.part: part.gpu_bytes for part in found.weights},
        "page_bytes_per_token": found.page_bytes_per_token,
        "flops_per_token_layer": found.flops,
    }


def print_plan(name: str, found: Plan, console: Console) -> None:
    """Collectives of a layer, those of a step, then memory and work."""
    step = found.step
    shape = f"{step.batch} x {step.tokens} tokens a data rank"
    title = f"{name}, {step.parallel}, {step.phase} of {shape}"
    console.print(_sent_table(f"{title}: a layer's collectives", found.in_layer))
    total = found.bytes_per_token_layer
    console.print("Beside: matrix products that may run meanwhile, of a layer's.")
    console.print(f"A layer sends {total:,.0f} bytes a token and rank ({total / 1000:.1f} KB).")
    if found.once:
        console.print(_sent_table("Once a step", found.once))
    console.print(_memory_table(found))
    flops = ", ".join(f"{part} {count / 1e6:,.1f}" for part, count in found.flops.items())
    console.print(f"MFLOP of a layer, a token and rank: {flops}.")


def _sent_table(title: str, sent: tuple[Sent, ...]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("place", "collective", "type", "ranks", "count", "bytes a token", "beside"):
        side = "left" if name in ("place", "collective") else "right"
        table.add_column(name, justify=side, overflow="fold")
    for one in sent:
        nbytes = f"{one.bytes_per_token:,.1f}{' expected' if one.is_expected else ''}"
        numbers = (one.dtype, str(one.ranks), f"{one.count:g}", nbytes, f"{one.work_beside:.0%}")
        table.add_row(one.place, one.kind, *numbers)
    return table


def _memory_table(found: Plan) -> Table:
    table = Table(title="Memory of a rank, the whole model", title_justify="left")
    table.add_column("kind")
    table.add_column("GB", justify="right")
    for part in found.weights:
        table.add_row(part.part, f"{part.gpu_bytes / GB:.3f}")
    table.add_row("all weights", f"{found.weight_bytes / GB:.3f}")
    step = found.step
    pages = found.page_bytes_per_token * step.batch * step.context
    table.add_row(f"pages of {step.batch} x {step.context:,} tokens", f"{pages / GB:.3f}")
    return table
