"""What a drafter is trained on: the target's own answers, made once by waves into a run's folder,
and packs of them by number.

A wave, and the pack of a step, are functions of the run and a number, so a position in the data is
one integer. A wave is a file, which appears when it is complete: an interrupted run goes on with
the first that is missing.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from configs.drafter_training import DrafterTrainingConfig
from minimax_jax.loaded import LoadedModel
from rl.data import HELD_OUT, SHORT, TRAIN, dialogue_at
from rl.draft_anchors import choose_anchors
from rl.pack_stream import encode_pieces
from rl.packing import Example, Pack, PackShape, pack_examples, tiles_needed
from rl.regenerate import Asked, Regeneration

# Families of each kind of dialogue; the kinds differ in length, and a wave holds one kind.
MIXES = {"short": SHORT, "ledger": ("list", "ledger", "ledger"), "long": ("long",)}
MEASURED_PACKS = 2  # of each kind, held out


@dataclass(frozen=True, kw_only=True)
class Wave:
    """Dialogues number `start` to `start + count - 1` of a kind."""

    split: str
    kind: str
    start: int
    count: int

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{self.split}-{self.kind}-{self.start:07d}.npz"


def waves(config: DrafterTrainingConfig) -> Iterator[Wave]:
    """All waves of a run: held out first, a wave or more of each kind; then those to learn from."""
    asked = {"short": config.short, "ledger": config.ledger, "long": config.long}
    for split in (HELD_OUT, TRAIN):
        for kind, count in asked.items():
            if split == HELD_OUT:
                count = min(count, config.eval_problems)
            for start in range(0, count, config.wave):
                size = min(config.wave, count - start)
                yield Wave(split=split, kind=kind, start=start, count=size)


def make_waves(
    loaded: LoadedModel,
    config: DrafterTrainingConfig,
    folder: Path,
    say: Callable[[str], None],
) -> None:
    """Answers every wave whose file is missing."""
    missing = [wave for wave in waves(config) if not (folder / wave.name).is_file()]
    if not missing:
        return
    folder.mkdir(parents=True, exist_ok=True)
    regeneration = Regeneration(loaded, rows=config.wave, answer_tokens=config.answer_tokens)
    for done, wave in enumerate(missing, start=1):
        examples = regeneration.answer(_asked(loaded, config, wave))
        _write(folder / wave.name, examples)
        learned = sum(int(example.learned.sum()) for example in examples)
        say(f"answers {done}/{len(missing)}: {wave.kind}, {learned:,} tokens of the target")


@dataclass(frozen=True, kw_only=True)
class DraftData:
    """The waves of a run as packs."""

    config: DrafterTrainingConfig
    folder: Path
    shape: PackShape

    @cached_property
    def examples(self) -> list[Example]:
        """All dialogues to learn from."""
        return [example for kind in MIXES for example in self._of(TRAIN, kind)]

    @cached_property
    def packs(self) -> list[Pack]:
        """All dialogues, shuffled once, in as many packs as they need."""
        order = np.random.default_rng((self.config.seed, 0)).permutation(len(self.examples))
        return list(self._packed(self.examples, order.tolist()))

    def order(self, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        """The numbers of the packs of steps `start` to `stop - 1`, each with its anchors. Every
        epoch takes all packs in an order, and with anchors, of its own.
        """
        size = len(self.packs)
        for step in range(start, stop):
            epoch, place = divmod(step, size)
            shuffled = np.random.default_rng((self.config.seed, 1, epoch)).permutation(size)
            number = int(shuffled[place])
            yield number, self._anchors(self.packs[number], step)

    def measured(self) -> Iterator[tuple[str, Pack, np.ndarray]]:
        """Held-out packs with their kind and anchors."""
        for kind in MIXES:
            examples = self._of(HELD_OUT, kind)
            packs = self._packed(examples, range(len(examples)))
            for number, pack in enumerate(itertools.islice(packs, MEASURED_PACKS)):
                yield kind, pack, self._anchors(pack, number)

    def _packed(self, examples: Sequence[Example], order: Sequence[int]) -> Iterator[Pack]:
        """Packs that are filled in this order."""
        chosen, free = [], self.shape.tiles
        for example in (examples[i] for i in order):
            needed = tiles_needed(example, self.shape)
            if needed > free:
                yield pack_examples([chosen], self.shape)
                chosen, free = [], self.shape.tiles
            chosen.append(example)
            free -= needed
        if chosen:
            yield pack_examples([chosen], self.shape)

    def _anchors(self, pack: Pack, step: int) -> np.ndarray:
        most, total = self.config.sequence_anchors, self.config.batch_anchors
        rng = np.random.default_rng((self.config.seed, 2, step))
        return choose_anchors(pack, rng, per_sequence=most, total=total)

    def _of(self, split: str, kind: str) -> list[Example]:
        mine = [w for w in waves(self.config) if w.split == split and w.kind == kind]
        return [example for wave in mine for example in _read(self.folder / wave.name)]


def _asked(loaded: LoadedModel, config: DrafterTrainingConfig, wave: Wave) -> list[Asked]:
    assert loaded.tokenizer is not None and loaded.template is not None
    asked = []
    for number in range(wave.start, wave.start + wave.count):
        families, seed = MIXES[wave.kind], config.seed
        turns = dialogue_at(number, wave.split, seed=seed, families=families)
        pieces = encode_pieces(turns, loaded.tokenizer, loaded.template)[::2]
        asked.append(Asked(pieces=pieces, seed=(seed << 32) + number))
    return asked


def _write(path: Path, examples: Sequence[Example]) -> None:
    unfinished = path.with_suffix(".tmp.npz")
    np.savez(
        unfinished,
        tokens=np.concatenate([example.tokens for example in examples]),
        learned=np.concatenate([example.learned for example in examples]),
        lengths=np.array([len(example.tokens) for example in examples]),
    )
    unfinished.replace(path)


def _read(path: Path) -> list[Example]:
    with np.load(path) as stored:
        ends = np.cumsum(stored["lengths"])[:-1]
        columns = (np.split(stored[name], ends) for name in ("tokens", "learned"))
        return [Example(*parts) for parts in zip(*columns, strict=True)]
