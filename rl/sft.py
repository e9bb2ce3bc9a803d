"""Supervised training from scratch: packs in, a complete checkpoint folder out, exact resume in
between.

A run's folder holds `train.jsonl` and `loss.png`, `checkpoints/` to resume from, and, when a
session ends, `model/`: the model in the checkpoint format with tokenizer and template, and
`training.json`, which says how it came to be.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from minimax_jax.chat import ChatTemplate, Tokenizer
from minimax_jax.checkpoint import save_model
from minimax_jax.checkpoint.folder import copy_companions
from minimax_jax.loaded import LoadedModel
from rl.data import SHORT, TRAIN
from rl.evaluate import held_out, score_model, total
from rl.optimizer import Metrics
from rl.pack_stream import packs
from rl.run_checkpoints import RunCheckpoints
from rl.run_log import Panel
from rl.session import Session, means, open_checkpoints
from rl.sft_run import Run, measured_packs
from rl.sft_step import FORMAT, Program, measure, new_state, seen_model, train_step

FIRST_STOP_PROBLEM = (
    1_000_000  # the problems that decide when to stop are none of those that `eval` asks
)


def train(run: Run, console: Console, *, resume: bool) -> None:
    """Trains until the last step, the wanted exact match or the time limit, and writes everything.

    Raises ValueError before anything is written when the folder holds another run, or none to
    resume.
    """
    with open_checkpoints(run, resume=resume) as checkpoints:
        Trainer(run, console, checkpoints, resume=resume).train()


class Trainer(Session):
    """One session of a supervised run."""

    panels: ClassVar[tuple[Panel, ...]] = (
        Panel(names=("loss", "indexer_loss"), ylabel="nats a token", log=True),
        Panel(
            names=("short_accuracy", "long_accuracy", "exact_match", "indexer_caught"),
            ylabel="share",
            ylim=(0.0, 1.0),
        ),
    )

    def __init__(self, run: Run, console: Console, checkpoints: RunCheckpoints, *, resume: bool):
        self.sparse = Program(model=run.model, config=run.config)
        self.dense = replace(self.sparse, every_block=True)
        super().__init__(run, console, checkpoints, new_state(self.sparse), resume=resume)
        self.measured = list(measured_packs(run))

    def updates(self) -> Iterator[Metrics]:
        """One step on each pack of the recipe."""
        config, recipe = self.run.config, self.run.recipe(TRAIN)
        for pack in packs(recipe, self.step, config.steps, config.workers):
            is_dense = recipe.kind(self.step) != "short" and self.step < config.dense_steps
            program = self.dense if is_dense else self.sparse
            pack = jax.tree.map(jnp.asarray, pack)
            self.state, metrics = train_step(self.state, pack, program)
            yield metrics

    def summary(self, columns: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Means, and the share of attention in the blocks that the indexer chose."""
        record = means(columns)
        looked, caught = record.pop("looked"), record.pop("caught")
        return {**record, "indexer_caught": caught / looked if looked else 1.0}

    def line(self, record: Mapping[str, Any]) -> str:
        """Accuracy on the training tokens, and the indexer's share."""
        return f"accuracy {record['accuracy']:.3f}  indexer {record['indexer_caught']:.2f}"

    def evaluate(self) -> str | None:
        """Loss and accuracy of held-out packs, exact match on short problems."""
        record: dict[str, Any] = {"step": self.step}
        for kind, pack in self.measured:
            sums = record.setdefault(kind, np.zeros(3))
            sums += np.asarray(measure(self.state.parameters, pack, self.sparse))
        for kind in dict(self.measured):
            loss, hits, count = record.pop(kind)
            record |= {f"{kind}_loss": loss / count, f"{kind}_accuracy": hits / count}
        record |= self.answers()
        self.note(record)
        self.reporter.say(f"step {self.step}: {_sentence(record)}")
        found, wanted = record["exact_match"], self.run.config.stop_at
        if wanted is None or found < wanted:
            return None
        return f"exact match {found:.3f} has reached {wanted}"

    def answers(self) -> dict[str, Any]:
        """Exact match on held-out short problems, in all and by family."""
        asked = held_out(self.run.config.eval_problems, SHORT, start=FIRST_STOP_PROBLEM)
        scores = score_model(self.loaded(), asked, temperature=1.0, seed=self.run.config.seed)
        families = {family: score.rate for family, score in scores.items()}
        return {"exact_match": total(scores.values()).rate, "families": families}

    def loaded(self) -> LoadedModel:
        """The model as it stands, ready to generate."""
        return LoadedModel(
            model=seen_model(self.state.parameters, self.sparse),
            formats=self.sparse.layout.formats,
            folder=self.run.text,
            tokenizer=Tokenizer.load(self.run.text),
            template=ChatTemplate.load(self.run.text),
        )

    def export(self, summary: Mapping[str, Any]) -> None:
        """Writes the model as a complete checkpoint folder."""
        folder = self.run.out / "model"
        if folder.exists():
            shutil.rmtree(folder)
        save_model(self.sparse.structure.model(self.state.parameters), folder, format=FORMAT)
        copy_companions(self.run.text, folder, drafter=False)  # that of other weights
        model, config = asdict(self.run.model), asdict(self.run.config)
        text = json.dumps({"model": model, "config": config, **summary}, indent=2) + "\n"
        (folder / "training.json").write_text(text, "utf-8")


def _sentence(record: dict[str, Any]) -> str:
    parts = [
        f"{name.replace('_', ' ')} {value:.3f}"
        for name, value in record.items()
        if name.endswith("accuracy") or name == "exact_match"
    ]
    return "held out: " + ", ".join(parts)
