"""The command `minimax-train`: `sft` trains a small model from scratch, `drafter` a drafter to a
model, `eval` measures one, `tokenizer` makes a tokenizer.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from configs.cli import add_flags, from_flags, read_config
from configs.drafter_training import DrafterTrainingConfig
from configs.model import ModelConfig
from configs.parts import DrafterConfig
from configs.presets import DRAFTERS, PRESETS
from configs.sft import SFTConfig
from minimax_jax.compiled import keep_compiled_programs
from minimax_jax.loaded import ASSETS, load
from minimax_jax.sampling import SamplingParams
from rl.evaluate import FAMILY_SETS, Score, held_out, score_model, total
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
    evaluate = commands.add_parser(
        "eval", allow_abbrev=False, help="exact match on held-out problems"
    )
    evaluate.set_defaults(run=_eval)
    evaluate.add_argument("--model", default="tiny", help="a bundled name, a folder or a hub name")
    evaluate.add_argument("--n", type=int, default=500, help="number of problems")
    evaluate.add_argument("--family", default="short", help=f"one of {', '.join(FAMILY_SETS)}")
    evaluate.add_argument("--temperature", type=float, default=1.0)
    evaluate.add_argument("--seed", type=int, default=0, help="of the sampling; the problems stay")
    evaluate.add_argument("--json", action="store_true", help="print JSON")
    tokenizer = commands.add_parser(
        "tokenizer", allow_abbrev=False, help="train the small tokenizer"
    )
    tokenizer.set_defaults(run=_tokenizer)
    tokenizer.add_argument(
        "folder", type=Path, help="holds chat_template.jinja; the files are written here"
    )
    return parser


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
    loaded = load(options.model)
    scores = score_model(loaded, asked, temperature=options.temperature, seed=options.seed)
    rows = {**scores, "all": total(scores.values())}
    if options.json:
        print(json.dumps({name: _as_json(score) for name, score in rows.items()}))
        return
    console.print(
        _table(rows, f"{options.model}: exact match at temperature {options.temperature:g}")
    )


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
