"""A drafter trained to a target: the target's answers in, `dspark/` out, exact resume in between
(spec/dspark 5).

A run's folder holds `answers/`, `train.jsonl` and `loss.png`, `checkpoints/` to resume from, and,
when a session ends, `dspark/`, which belongs into the target's folder, and `training.json`, which
says how it came to be.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from configs.drafter_training import DrafterTrainingConfig
from configs.model import ModelConfig
from configs.parts import DrafterConfig
from minimax_jax.checkpoint.folder import DRAFTER
from minimax_jax.loaded import LoadedModel
from minimax_jax.speculative.checkpoint import save_drafter
from rl.draft_data import DraftData, make_waves
from rl.draft_losses import LossSums, metrics_of
from rl.draft_step import FORMAT, Captured, Program, capture, measure, new_state, train_step
from rl.optimizer import Metrics
from rl.packing import Pack, PackShape
from rl.run_checkpoints import RunCheckpoints
from rl.run_log import Panel
from rl.session import Session, means, open_checkpoints

# Fields that a resumed run may not change: it would not be the same data or arithmetic any more.
FIXED = ("short", "ledger", "long", "wave", "answer_tokens", "batch_tokens", "batch_anchors")
FIXED += ("sequence_anchors", "loss_decay", "draft_cache", "dtype", "seed")


@dataclass(frozen=True, kw_only=True)
class DrafterRun:
    """Which drafter to train to which target, how, and where to."""

    loaded: LoadedModel
    drafter: DrafterConfig
    config: DrafterTrainingConfig
    out: Path

    def __post_init__(self) -> None:
        block, context = self.model.indexer.block_size, self.model.max_context
        size = self.config.batch_tokens
        if size % block:
            raise ValueError(f"batch_tokens={size} is not a multiple of block_size={block}")
        if size < context:
            raise ValueError(f"batch_tokens={size} cannot hold a dialogue of {context} tokens")
        answer = self.config.answer_tokens
        if answer >= context:
            raise ValueError(f"answer_tokens={answer} leaves nothing of a context of {context}")
        if self.loaded.tokenizer is None or self.loaded.template is None:
            raise ValueError(f"{self.loaded.folder} has no tokenizer or no chat template")

    @property
    def model(self) -> ModelConfig:
        """The target's shape with this drafter."""
        return replace(self.loaded.config, drafter=self.drafter)

    @property
    def fixed(self) -> dict[str, Any]:
        """What a resumed run may not change."""
        return {"model": str(self.model), **{name: getattr(self.config, name) for name in FIXED}}

    @property
    def program(self) -> Program:
        """What its steps are compiled for."""
        formats = replace(self.loaded.formats, draft=self.config.draft_cache)
        return Program(model=self.model, config=self.config, formats=formats)

    @property
    def data(self) -> DraftData:
        """What it learns from."""
        block = self.model.indexer.block_size
        shape = PackShape(
            tiles=self.config.batch_tokens // block,
            tile_tokens=block,
            blocks=-(-self.model.max_context // block),
        )
        return DraftData(config=self.config, folder=self.out / "answers", shape=shape)


def train_drafter(run: DrafterRun, console: Console, *, resume: bool) -> None:
    """Trains until the last step or the time limit, and writes everything.

    Raises ValueError before anything is written when the folder holds another run, or none to
    resume.
    """
    with open_checkpoints(run, resume=resume) as checkpoints:
        DrafterTrainer(run, console, checkpoints, resume=resume).train()


class DrafterTrainer(Session):
    """One session of a drafter's run."""

    panels: ClassVar[tuple[Panel, ...]] = (
        Panel(names=("loss", "ce", "tv", "confidence_loss"), ylabel="a row", log=True),
        Panel(
            names=("acceptance_length", "short_length", "ledger_length", "long_length"),
            ylabel="tokens a step",
        ),
    )

    def __init__(
        self, run: DrafterRun, console: Console, checkpoints: RunCheckpoints, *, resume: bool
    ):
        self.program, self.target = run.program, run.loaded
        super().__init__(run, console, checkpoints, new_state(self.program), resume=resume)
        make_waves(run.loaded, run.config, run.out / "answers", self.reporter.say)
        self.data = run.data
        self.kept: dict[int, tuple[Pack, Captured]] = {}
        self.measured = [
            (kind, *self._captured(pack), jnp.asarray(anchors))
            for kind, pack, anchors in self.data.measured()
        ]

    def updates(self) -> Iterator[Metrics]:
        """One step on each pack."""
        for number, anchors in self.data.order(self.step, self.run.config.steps):
            pack, captured = self.kept.get(number) or self._captured(self.data.packs[number])
            if len(self.kept) < self.run.config.kept_packs:
                self.kept[number] = pack, captured
            where = jnp.asarray(anchors)
            self.state, metrics = train_step(
                self.state, self.target.model, pack, captured, where, self.program
            )
            yield metrics

    def summary(self, columns: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Means over the steps."""
        return means(columns)

    def line(self, record: Mapping[str, Any]) -> str:
        """Expected acceptance."""
        return f"acceptance {_acceptance(record)}"

    def evaluate(self) -> str | None:
        """Expected acceptance on held-out problems, by kind; never ends a run."""
        sums: dict[str, list[LossSums]] = {}
        for kind, pack, captured, anchors in self.measured:
            found = measure(
                self.state.parameters, self.target.model, pack, captured, anchors, self.program
            )
            sums.setdefault(kind, []).append(found)
        record: dict[str, Any] = {"step": self.step}
        for kind, parts in sums.items():
            whole = jax.device_get(metrics_of(reduce(_add, parts)))
            record[f"{kind}_length"] = float(whole["acceptance_length"])
            record[kind] = {name: np.asarray(value).tolist() for name, value in whole.items()}
            self.reporter.say(f"step {self.step}: held out {kind}: {_acceptance(record[kind])}")
        self.note(record)

    def _captured(self, pack: Pack) -> tuple[Pack, Captured]:
        """A pack on the device, and the target on it."""
        pack = jax.tree.map(jnp.asarray, pack)
        with self.target.on_mesh():
            return pack, capture(self.target.model, self.target.adapter, pack, self.program)

    def export(self, summary: Mapping[str, Any]) -> None:
        """Writes the drafter's folder."""
        out = self.run.out
        if (out / DRAFTER).exists():
            shutil.rmtree(out / DRAFTER)
        drafter = self.program.structure.model(self.state.parameters)
        save_drafter(drafter, self.run.model, out, format=FORMAT)
        made = {"drafter": asdict(self.run.drafter), "config": asdict(self.run.config)}
        text = json.dumps({**made, **summary}, indent=2) + "\n"
        (out / "training.json").write_text(text, "utf-8")


def _add(one: LossSums, other: LossSums) -> LossSums:
    return jax.tree.map(jnp.add, one, other)


def _acceptance(record: Mapping[str, Any]) -> str:
    """The expected length, and the share of blocks kept up to each position."""
    positions = " ".join(f"{share:.2f}" for share in record["survival"])
    return f"{record['acceptance_length']:.2f} ({positions})"
