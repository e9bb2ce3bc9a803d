"""Fits the temperatures of a drafter's confidences from what became of its drafts (spec/dspark 3):
`minimax-train calibrate`.

The drafts are those of speculative decoding on held-out problems, at the temperature that is
served, with all of them tested in each step: widths that confidences chose would hide the others'
fate.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool
from rich.console import Console
from rich.table import Table

from minimax_jax.chat import Chat, Prompt
from minimax_jax.checkpoint.folder import DRAFTER
from minimax_jax.decoders import Verified
from minimax_jax.generate import read_prompt
from minimax_jax.loaded import LoadedModel, load
from minimax_jax.sampling import SamplingParams
from minimax_jax.speculative.calibration import FILE, Calibration, fit, write_calibration
from minimax_jax.wave import GenerateOptions, Wave
from rl.data import prompt_messages
from rl.evaluate import ANSWER_TOKENS, FAMILY_SETS, held_out

ROWS = 64  # sequences at a time


def counts(step: Verified) -> Bool[np.ndarray, "B"]:
    """Whose drafts all showed what would become of them: a limit leaves drafts untested, and what
    would have been accepted behind a stop token is not known.
    """
    assert step.confidence is not None
    return (step.tested == step.confidence.shape[1]) & step.running


def calibrate(steps: Iterable[Verified]) -> Calibration:
    """The temperatures of a drafter, from a record of its steps.

    Raises ValueError where no block counts.
    """
    steps = list(steps)
    logits = [step.confidence[counts(step)] for step in steps if step.confidence is not None]
    accepted = [step.accepted[counts(step)] for step in steps if step.confidence is not None]
    if not any(map(len, accepted)):
        raise ValueError(f"{len(steps)} steps have no block whose drafts all were tested")
    return fit(np.concatenate(logits), np.concatenate(accepted))


def record(
    loaded: LoadedModel, prompts: Sequence[Prompt], *, temperature: float, seed: int
) -> list[Verified]:
    """What became of the drafts of all prompts' answers, one sampled answer each."""
    assert loaded.speculation is not None and loaded.tokenizer is not None
    options = GenerateOptions(
        max_tokens=ANSWER_TOKENS,
        stop=(),
        logprobs=None,
        speculative=loaded.speculation.config,
    )
    steps = []
    for first in range(0, len(prompts), ROWS):
        some = prompts[first : first + ROWS]
        params = [
            SamplingParams(
                temperature=temperature,
                seed=seed + first + row,
                stop_token_ids=loaded.tokenizer.stop_ids,
            )
            for row in range(len(some))
        ]
        steps += _steps(Wave(loaded, list(some), params, options))
    return steps


def _steps(wave: Wave) -> list[Verified]:
    """All steps of a wave, up to its last sequence's end; its stops are the device's alone."""
    steps: list[Verified] = []
    while not steps or steps[-1].running.any():
        steps += [part.verified for part in wave.decoder.advance() if part.verified is not None]
    return steps


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """The flags of `minimax-train calibrate`."""
    parser.set_defaults(run=_run)
    parser.add_argument("--model", default="tiny", help="a bundled name, a folder or a hub name")
    parser.add_argument("--n", type=int, default=512, help="number of held-out problems")
    parser.add_argument("--family", default="short", help=f"one of {', '.join(FAMILY_SETS)}")
    parser.add_argument("--temperature", type=float, default=1.0, help="as it is served")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling; the problems stay")
    parser.add_argument("--out", type=Path, help=f"folder of {FILE}, by default the model's own")


def _run(options: argparse.Namespace, console: Console) -> None:
    if options.family not in FAMILY_SETS:
        raise ValueError(f"family {options.family!r} is not one of {', '.join(FAMILY_SETS)}")
    if options.n < 1:
        raise ValueError(f"n={options.n} is not at least 1")
    loaded = load(options.model, speculative=True)
    if loaded.drafter is None or loaded.drafter.confidence is None:
        raise ValueError(f"the drafter of {options.model} has no confidence head to calibrate")
    asked = held_out(options.n, FAMILY_SETS[options.family])
    prompts = [read_prompt(loaded, prompt_messages(one), Chat(messages=())) for one in asked]
    steps = record(loaded, prompts, temperature=options.temperature, seed=options.seed)
    calibration = calibrate(steps)
    folder = options.out or loaded.folder / DRAFTER
    folder.mkdir(parents=True, exist_ok=True)
    write_calibration(folder, calibration)
    console.print(_table(calibration))
    console.print(f"{folder / FILE}: {calibration.num_steps} blocks", highlight=False)


def _table(calibration: Calibration) -> Table:
    table = Table("draft", "temperature", "calibration error", "before")
    assert calibration.error is not None and calibration.raw_error is not None
    rows = zip(calibration.temperatures, calibration.error, calibration.raw_error, strict=True)
    for place, (temperature, error, raw) in enumerate(rows):
        table.add_row(str(place + 1), f"{temperature:.2f}", f"{error:.1%}", f"{raw:.1%}")
    return table
