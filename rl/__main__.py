"""The command `minimax-train`: `sft` trains a small model from scratch, `grpo` one by reinforcement
and `plot` draws its curves, `drafter` trains a drafter to a model and `calibrate` fits its
confidences, `eval` measures a model, `tokenizer` makes a tokenizer.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from configs.cli import add_flags, from_flags, read_config
from configs.drafter_training import DrafterTrainingConfig
from configs.model import ModelConfig
from configs.parts import DrafterConfig
from configs.presets import DRAFTERS, PRESETS
from configs.rl import GRPO_PRESETS, GRPOConfig
from configs.sft import SFTConfig
from minimax_jax.compiled import keep_compiled_programs
from minimax_jax.loaded import ASSETS, load
from minimax_jax.sampling import SamplingParams
from minimax_jax.speculative.stats import SpeculationStats
from rl.calibrate import add_calibrate
from rl.curves import plot_runs
from rl.evaluate import (
    FAMILY_SETS,
    Score,
    held_out,
    sampled_answers,
    score_answers,
    speculation_by_prompt,
    total,
)
from rl.grpo import train_grpo
from rl.grpo_run import start_run as start_grpo
from rl.sft import train
from rl.sft_run import start_run
from rl.sft_step import DTYPES
from rl.tokenizer import train_tokenizer
from rl.train_drafter import DrafterRun, train_drafter

TEXT = ASSETS / "tiny"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one subcommand; bad input is one sentence on stderr and exit code 2."""
    options = _parser().parse_args(arguments)
    keep_compiled_programs()
    try:
        options.run(options, Console())
    except (ValueError, OSError) as error:
        print(f"minimax-train: {error}", file=sys.stderr)
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="minimax-train", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    sft = commands.add_parser(
        "sft", allow_abbrev=False, help="train from scratch on generated problems"
    )
    sft.set_defaults(run=_sft)
    sft.add_argument("--config", default="tiny", help="a preset's name or a TOML file")
    sft.add_argument(
        "overrides", nargs="*", metavar="key=value", help="changes of the model's config"
    )
    sft.add_argument("--out", type=Path, required=True, help="the run's folder")
    sft.add_argument(
        "--text", type=Path, default=TEXT, help="folder of tokenizer and chat template"
    )
    sft.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in --out"
    )
    add_flags(sft, SFTConfig)
    _add_grpo(commands)
    drafter = commands.add_parser(
        "drafter", allow_abbrev=False, help="train a DSpark drafter on a model's own answers"
    )
    drafter.set_defaults(run=_drafter)
    drafter.add_argument("--target", default="tiny", help="a bundled name, a folder or a hub name")
    drafter.add_argument(
        "--config", default="tiny", help=f"the drafter: {', '.join(DRAFTERS)} or a TOML file"
    )
    drafter.add_argument(
        "overrides", nargs="*", metavar="key=value", help="changes of the drafter's config"
    )
    drafter.add_argument("--out", type=Path, required=True, help="the run's folder")
    drafter.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in --out"
    )
    add_flags(drafter, DrafterTrainingConfig)
    _add_eval(commands)
    add_calibrate(
        commands.add_parser(
            "calibrate",
            allow_abbrev=False,
            help="fit a drafter's confidences to what became of them",
        )
    )
    tokenizer = commands.add_parser(
        "tokenizer", allow_abbrev=False, help="train the small tokenizer"
    )
    tokenizer.set_defaults(run=_tokenizer)
    tokenizer.add_argument(
        "folder", type=Path, help="holds chat_template.jinja; the files are written here"
    )
    return parser


def _add_eval(commands: Any) -> None:
    evaluate = commands.add_parser(
        "eval", allow_abbrev=False, help="exact match on held-out problems"
    )
    evaluate.set_defaults(run=_eval)
    evaluate.add_argument("--model", default="tiny", help="a bundled name, a folder or a hub name")
    evaluate.add_argument("--n", type=int, default=500, help="number of problems")
    evaluate.add_argument("--family", default="short", help=f"one of {', '.join(FAMILY_SETS)}")
    evaluate.add_argument("--temperature", type=float, default=1.0)
    evaluate.add_argument("--seed", type=int, default=0, help="of the sampling; the problems stay")
    evaluate.add_argument(
        "--speculative", action="store_true", help="with the model's drafter, and its counts too"
    )
    evaluate.add_argument("--json", action="store_true", help="print JSON")


def _add_grpo(commands: Any) -> None:
    """`grpo` and `plot`."""
    grpo = commands.add_parser("grpo", allow_abbrev=False, help="reinforcement by GRPO")
    grpo.set_defaults(run=_grpo)
    presets = ", ".join(GRPO_PRESETS)
    grpo.add_argument("--config", default="tiny_arith", help=f"{presets}, or a TOML file")
    grpo.add_argument(
        "overrides", nargs="*", metavar="key=value", help="changes of the config (configs/rl.py)"
    )
    grpo.add_argument("--out", type=Path, required=True, help="the run's folder")
    grpo.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in --out"
    )
    plot = commands.add_parser("plot", allow_abbrev=False, help="the curves of GRPO runs")
    plot.set_defaults(run=_plot)
    plot.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs")
    plot.add_argument(
        "--out", type=Path, help="the picture; by default curves.png in the first folder"
    )


def _grpo(options: argparse.Namespace, console: Console) -> None:
    config = read_config(GRPOConfig, GRPO_PRESETS, options.config, options.overrides)
    train_grpo(start_grpo(config, options.out), console, resume=options.resume)


def _plot(options: argparse.Namespace, console: Console) -> None:
    picture = options.out or options.runs[0] / "curves.png"
    plot_runs(options.runs, picture)
    console.print(f"{picture}", highlight=False)


def _sft(options: argparse.Namespace, console: Console) -> None:
    model = read_config(ModelConfig, PRESETS, options.config, options.overrides)
    run = start_run(model, from_flags(SFTConfig, options), options.text, options.out)
    train(run, console, resume=options.resume)


def _drafter(options: argparse.Namespace, console: Console) -> None:
    drafter = read_config(DrafterConfig, DRAFTERS, options.config, options.overrides)
    config = from_flags(DrafterTrainingConfig, options)
    loaded = load(options.target, dtype=DTYPES[config.dtype])
    run = DrafterRun(loaded=loaded, drafter=drafter, config=config, out=options.out)
    train_drafter(run, console, resume=options.resume)


def _eval(options: argparse.Namespace, console: Console) -> None:
    if options.family not in FAMILY_SETS:
        raise ValueError(f"family {options.family!r} is not one of {', '.join(FAMILY_SETS)}")
    if options.n < 1:
        raise ValueError(f"n={options.n} is not at least 1")
    SamplingParams(temperature=options.temperature, seed=options.seed)  # refuses before loading
    asked = held_out(options.n, FAMILY_SETS[options.family])
    loaded = load(options.model, speculative=options.speculative)
    how = {"temperature": options.temperature, "seed": options.seed}
    answers = sampled_answers(loaded, asked, **how)
    scores = score_answers(asked, answers)
    rows = {**scores, "all": total(scores.values())}
    by_prompt = speculation_by_prompt(answers)
    stats = SpeculationStats.total(by_prompt.values())
    if options.json:
        record: dict[str, object] = {name: _as_json(score) for name, score in rows.items()}
        if by_prompt:
            record["speculation"] = stats.to_dict()
            lengths = {low: one.to_dict() for low, one in by_prompt.items()}
            record["speculation_by_prompt_tokens"] = lengths
        print(json.dumps(record))
        return
    console.print(
        _table(rows, f"{options.model}: exact match at temperature {options.temperature:g}")
    )
    if by_prompt:
        console.print(f"speculation: {stats}", highlight=False)
    if len(by_prompt) > 1:
        for low, one in by_prompt.items():
            console.print(f"  prompts of {low} tokens: {one}", highlight=False)


def _tokenizer(options: argparse.Namespace, console: Console) -> None:
    tokenizer = train_tokenizer(options.folder)
    console.print(f"{options.folder}: {tokenizer.get_vocab_size()} tokens", highlight=False)


def _as_json(score: Score) -> dict[str, object]:
    low, high = score.interval
    return {"exact_match": score.rate, "low": low, "high": high, "n": score.total}


def _table(rows: dict[str, Score], title: str) -> Table:
    table = Table("family", "exact match", "95 % interval", "problems", title=title)
    for name, score in rows.items():
        low, high = score.interval
        cells = (f"{score.rate:.1%}", f"{low:.1%} to {high:.1%}", f"{score.hits}/{score.total}")
        table.add_row(name, *cells)
    return table


if __name__ == "__main__":
    main()
