"""`minimax-train eval`: exact match of a model on held-out problems, by family."""

import argparse
import json

from rich.console import Console
from rich.table import Table

from minimax_jax.loaded import load
from minimax_jax.sampling import SamplingParams
from minimax_jax.speculative.stats import SpeculationStats
from rl.evaluate import (
    FAMILY_SETS,
    Score,
    held_out,
    sampled_answers,
    score_answers,
    speculation_by_prompt,
    total,
)


def add_eval(evaluate: argparse.ArgumentParser) -> None:
    """The flags of `eval`, and what runs."""
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
