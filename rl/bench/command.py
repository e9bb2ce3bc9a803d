"""`minimax-train bench`: its flags, its table and its JSON."""

import argparse
import json
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from configs.cli import read_config
from configs.model import ModelConfig
from configs.presets import PRESETS
from configs.rl import GRPO_PRESETS, GRPOConfig
from minimax_jax.bench.calls import fallbacks_of
from minimax_jax.bench.command import device_limits, shortened
from minimax_jax.bench.layer import of_layers
from minimax_jax.cache import formats_of
from minimax_jax.loaded import LoadedModel
from minimax_jax.quantize import FORMATS
from minimax_jax.random_model import random_model
from rl.bench.answers import Answers, TimedAnswers
from rl.bench.update import Packed, TimedUpdate
from rl.bench.work import Measured
from rl.offload import peak_memory
from rl.optimizer import TrainState, make_optimizer
from rl.policy import initial_parameters
from rl.sft_step import DTYPES

Case = Answers | Packed
Timed = TimedAnswers | TimedUpdate


def add_bench(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench`, and what runs."""
    parser.set_defaults(run=_bench)
    known = ", ".join(GRPO_PRESETS)
    parser.add_argument("--config", default="tiny_arith", help=f"{known}, or a TOML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="changes of the config (configs/rl.py)"
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny", help="the model")
    parser.add_argument("--layers", type=int, help="only so many, all with experts; by default all")
    parser.add_argument("--weights", choices=FORMATS, default="m3.1", help="their stored form")
    what = parser.add_argument_group("what is run (several numbers: one run of each)")
    what.add_argument("--rollout", type=int, nargs="*", default=[256], help="answers drawn at once")
    what.add_argument(
        "--train", type=int, nargs="*", default=[2048], help="places of a pack that is learned from"
    )
    what.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    what.add_argument("--answer", type=int, default=64, help="tokens of each answer")
    what.add_argument(
        "--split", action="store_true", help="tell forward from backward: a program more"
    )
    parser.add_argument("--json", type=Path, help="where to write all figures")


def _bench(options: argparse.Namespace, console: Console) -> None:
    for name in ("layers", "prompt", "answer"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} is not at least 1")
    config = read_config(GRPOConfig, GRPO_PRESETS, options.config, options.overrides)
    length = {"prompt": options.prompt, "answer": options.answer}
    cases: list[Case] = [Answers(rows=rows, **length) for rows in options.rollout]
    cases += [Packed(places=places, **length) for places in options.train]
    _check(cases, config, PRESETS[options.preset]())
    report = _Report(options, console)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = _random(options, config)
        report.say(f"weights made after {report.seconds:.1f} s")
        for measured in _measured(loaded, config, cases, options.split, report):
            report.add(measured, fallbacks_of(caught))


def _check(cases: Sequence[Case], config: GRPOConfig, model: ModelConfig) -> None:
    """Raises ValueError, before any weight is made, for what none of the cases could be."""
    for case in cases:
        if case.prompt + case.answer > model.max_context:
            raise ValueError(
                f"a prompt of {case.prompt} and an answer of {case.answer} tokens are more than "
                f"the context of {model.max_context}"
            )
        case.check(config, model.indexer.block_size)


def _random(options: argparse.Namespace, config: GRPOConfig) -> LoadedModel:
    """A model of random weights, with the caches of a checkpoint in that form."""
    model = shortened(PRESETS[options.preset](), options.layers)
    if options.layers is not None:
        model = of_layers(model, options.layers)
    made = random_model(model, DTYPES[config.dtype], options.weights, seed=config.seed)
    return LoadedModel(
        model=jax.block_until_ready(made), formats=formats_of(model, config.dtype), folder=Path()
    )


def _measured(
    loaded: LoadedModel, config: GRPOConfig, cases: Sequence[Case], split: bool, report: "_Report"
) -> Iterator[Measured]:
    """Compiles for all cases at once, which on a GPU is most of the time, then times one by one. A
    case that cannot be run is told after those before it.
    """
    parameters = initial_parameters(loaded, config)
    state = TrainState.new(parameters, make_optimizer(config))

    def timed(case: Case) -> TimedAnswers | TimedUpdate:
        if isinstance(case, Answers):
            return TimedAnswers(loaded, config, parameters, case)
        return TimedUpdate(loaded, config, state, case, split)

    all_timed = [timed(case) for case in cases]
    started = time.perf_counter()
    with ThreadPoolExecutor(max(1, len(all_timed))) as pool:
        compiled = {pool.submit(one.compile): one.name for one in all_timed}
        for done in as_completed(compiled):
            seconds = time.perf_counter() - started
            how = "not compiled" if done.exception() else "compiled"
            report.say(f"{compiled[done]}: {how} after {seconds:.1f} s")
    for one, done in zip(all_timed, compiled, strict=True):
        done.result()
        yield one.measure()


class _Report:
    """The lines on the terminal, and the JSON, which is written anew with each row: what was
    measured is there whatever comes after.
    """

    def __init__(self, options: argparse.Namespace, console: Console):
        self._console, self._path, self._start = console, options.json, time.perf_counter()
        self._limits = device_limits()
        device = jax.devices()[0].device_kind
        self._record: dict[str, Any] = {
            "device": device,
            "jax": jax.__version__,
            "config": options.config,
            "overrides": options.overrides,
            "preset": options.preset,
            "layers": options.layers,
            "weights": options.weights,
            "limits": self._limits,
            "rows": [],
        }
        text = f"{options.config} on random {options.weights} weights of {options.preset}"
        self.say(f"{text}, {options.layers or 'all'} layers, {device}, JAX {jax.__version__}")
        if self._limits is not None:
            copy, gemm = self._limits["bytes"] / 1e12, self._limits["flops"] / 1e12
            self.say(f"copy {copy:.2f} TB/s, GEMM {gemm:.0f} TFLOP/s")

    def add(self, measured: Measured, fallbacks: Sequence[str]) -> None:
        """A row; and what dispatch said so far of ops that have no kernel here."""
        limit = None if self._limits is None else measured.limit(self._limits)
        row = {
            "name": measured.name,
            "ms": measured.seconds * 1e3,
            "tokens_a_second": measured.tokens / measured.seconds,
            "flops": measured.flops,
            "bytes": measured.bytes,
            "limit_ms": None if limit is None else limit * 1e3,
            "share_of_limit": None if limit is None else limit / measured.seconds,
            "parts_ms": {name: seconds * 1e3 for name, seconds in measured.parts.items()},
            **peak_memory(),
        }
        self._record["rows"].append(row)
        self._record |= {"fallbacks": list(fallbacks), "bench_s": self.seconds}
        self.say(_text(row))
        if self._path is not None:
            self._path.write_text(json.dumps(self._record, indent=2) + "\n", "utf-8")

    @property
    def seconds(self) -> float:
        """Since the bench began."""
        return time.perf_counter() - self._start

    def say(self, text: str) -> None:
        """A line on the terminal."""
        self._console.print(text, highlight=False, soft_wrap=True)


def _text(row: dict[str, Any]) -> str:
    parts = [f"{row['ms']:.1f} ms", f"{row['tokens_a_second']:.0f} tokens/s"]
    if row["limit_ms"] is not None:
        parts.append(f"limit {row['limit_ms']:.1f} ms ({row['share_of_limit']:.0%})")
    parts += [f"{name} {ms:.1f} ms" for name, ms in row["parts_ms"].items()]
    memory = row.get("perf/max_memory_allocated_gb", row["perf/cpu_memory_used_gb"])
    parts.append(f"peak memory so far {memory:.1f} GiB")
    return f"{row['name']}: {', '.join(parts)}"
