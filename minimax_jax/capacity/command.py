"""`minimax-jax capacity`: what fits on some GPUs, from a config alone. No device is needed."""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from configs.model import ModelConfig
from configs.parallel import ParallelConfig
from configs.parts import CACHE_FORMATS
from configs.presets import PRESETS
from minimax_jax.cache import formats_of
from minimax_jax.capacity import REFERENCE_WEIGHTS, Question, as_the_reference, capacity
from minimax_jax.capacity.gpus import GB, GPUS, gpu_memory
from minimax_jax.capacity.plot import plot_capacity
from minimax_jax.capacity.report import Reference, capacity_json, print_capacity
from minimax_jax.checkpoint.folder import read_config
from minimax_jax.loaded import find
from minimax_jax.quantize import FORMATS
from pallas_kernels.layouts.pool import CacheFormats

MODEL, REFERENCE_GPU = "m3_1_flash", "b300"
CONFIG_FILES = ("config.json", "dspark/config.json")


def add_capacity(parser: argparse.ArgumentParser) -> None:
    """Gives the command its flags."""
    parser.set_defaults(run=_capacity)
    parser.add_argument("--gpu", help=f"one of {', '.join(GPUS)}; or give --memory")
    parser.add_argument("--gpus", type=int, help="how many; by default as --parallel needs")
    parser.add_argument("--parallel", help="such as dep4 or tp4,ep; by default tp over --gpus")
    presets = ", ".join(PRESETS)
    help_model = f"a shape ({presets}), bundled name, folder, or hub name (default {MODEL})"
    parser.add_argument("--model", default=MODEL, help=help_model)
    parser.add_argument("--context", type=int, default=262144, help="tokens a sequence")
    form = parser.add_argument_group("formats (by default what the model's config names, or bf16)")
    form.add_argument("--weights", choices=FORMATS, help="m3.1 is NVFP4 experts in MXFP8")
    form.add_argument("--kv", choices=CACHE_FORMATS, help="of cached keys and values")
    form.add_argument("--index", choices=CACHE_FORMATS, help="of cached index keys")
    form.add_argument("--draft", choices=CACHE_FORMATS, help="of the drafter's keys and values")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--memory", type=float, help="GB of a GPU, in place of the figure known")
    limits.add_argument("--utilization", type=float, default=0.92, help="share that may be used")
    limits.add_argument("--overhead", type=float, default=0.0, help="GB of a GPU for all else")
    limits.add_argument("--max-num-seqs", type=int, help="running sequences a data rank")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--plot", type=Path, help="a picture of sequences against context")


def _capacity(options: argparse.Namespace) -> None:
    question = _question(options)
    answer, reference = capacity(question), _reference(options, question)
    gpus = question.parallel.num_devices
    gpu = options.gpu or f"{options.memory:g} GB"
    title = f"{options.model} on {gpus} x {gpu}, {options.parallel or question.parallel}"
    if options.plot is not None:
        plot_capacity(title, answer, options.plot)
    if options.json:
        asked = {"model": options.model, "gpu": options.gpu}
        print(json.dumps(asked | capacity_json(answer, reference)))
    else:
        print_capacity(title, answer, reference, Console(highlight=False))


def _question(options: argparse.Namespace) -> Question:
    config = _config(options.model)
    return Question(
        config=config,
        parallel=_parallel(options.parallel, options.gpus),
        formats=_formats(config, options),
        memory_bytes=_memory(options),
        context=options.context,
        utilization=options.utilization,
        overhead_bytes=_bytes(options.overhead),
        weights=options.weights,
        max_num_seqs=options.max_num_seqs,
    )


def _memory(options: argparse.Namespace) -> int:
    if options.gpu is None and options.memory is None:
        raise ValueError("nothing says how much memory a GPU has: give --gpu or --memory")
    known = None if options.gpu is None else gpu_memory(options.gpu)
    return _bytes(options.memory) if known is None or options.memory is not None else known


def _bytes(gigabytes: float) -> int:
    if not math.isfinite(gigabytes):
        raise ValueError(f"{gigabytes} GB is not a finite number")
    return round(gigabytes * GB)


def _config(model: str) -> ModelConfig:
    """The config of a named shape, or of a checkpoint, of which nothing else is read or fetched."""
    if model in PRESETS:
        return PRESETS[model]()
    return read_config(find(model, files=CONFIG_FILES))


def _parallel(text: str | None, gpus: int | None) -> ParallelConfig:
    if gpus is not None and gpus < 1:
        raise ValueError(f"gpus={gpus} is not at least 1")
    if text is None:
        return ParallelConfig(tp=gpus or 1)
    parallel = ParallelConfig.parse(text)
    if gpus is not None and parallel.num_devices != gpus:
        raise ValueError(f"{text!r} is for {parallel.num_devices} GPUs, but gpus={gpus}")
    return parallel


def _formats(config: ModelConfig, options: argparse.Namespace) -> CacheFormats:
    formats = formats_of(config, "bf16", kv=options.kv, index=options.index)
    return replace(formats, draft=options.draft or "bf16")


def _reference(options: argparse.Namespace, question: Question) -> Reference:
    """What the published way of counting gives, for the model and GPU that it speaks of."""
    if (options.model, (options.gpu or "").lower()) != (MODEL, REFERENCE_GPU):
        return {}
    return {name: as_the_reference(question, name) for name in REFERENCE_WEIGHTS}
