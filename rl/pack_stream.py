"""Packs of generated problems by number: pack n is a function of the recipe and n, so a position in
the data is one integer.

Worker processes make packs ahead of the trainer, in any order, and change nothing.
"""

import itertools
import multiprocessing
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np

from minimax_jax.chat import ChatTemplate, Tokenizer
from rl.data import SHORT, Problem, dialogue_at, messages, prompt_messages
from rl.packing import Example, Pack, PackShape, pack_examples

PROBLEMS_A_PACK = 1 << 20  # numbers reserved for each pack; more than any pack holds
AHEAD = 2  # packs in the making for each worker


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of pack: the longest context, and mixes of families, of which each fills what those
    before it leave free.
    """

    tokens: int | None  # None: the model's own limit
    mixes: tuple[tuple[str, ...], ...]


KINDS = {
    "short": Kind(tokens=128, mixes=(SHORT,)),
    "list": Kind(tokens=352, mixes=(("list",), SHORT)),
    # ledgers twice as often as the longest, which alone would fill most packs
    "long": Kind(tokens=None, mixes=(("list", "ledger", "ledger", "long"), SHORT)),
}


@dataclass(frozen=True, kw_only=True)
class PackRecipe:
    """Everything that a pack depends on beside its number. `folder` holds tokenizer and chat
    template.
    """

    folder: str
    split: str
    seed: int
    tiles: int
    block_size: int
    max_context: int
    list_steps: int
    long_steps: int
    long_fraction: float

    def shape(self, kind: str) -> PackShape:
        """The shape of a kind of pack; kinds differ in the width of the block table."""
        tokens = min(KINDS[kind].tokens or self.max_context, self.max_context)
        blocks = -(-tokens // self.block_size)
        return PackShape(tiles=self.tiles, tile_tokens=self.block_size, blocks=blocks)

    def kind(self, number: int) -> str:
        """The kind of pack `number`: `list_steps` lists, `long_steps` long ones, then short ones
        with a share of `long_fraction` long ones, evenly.
        """
        if number < self.list_steps:
            return "list"
        if number < self.list_steps + self.long_steps:
            return "long"
        before, after = int(number * self.long_fraction), int((number + 1) * self.long_fraction)
        return "long" if after > before else "short"


def make_pack(recipe: PackRecipe, number: int) -> Pack:
    """Pack `number` of a recipe."""
    return pack_of_kind(recipe, recipe.kind(number), number)


def pack_of_kind(recipe: PackRecipe, kind: str, number: int) -> Pack:
    """Pack `number` as it would be, were it of this kind."""
    numbers = itertools.count(number * PROBLEMS_A_PACK)
    streams = (_examples(recipe, numbers, families) for families in KINDS[kind].mixes)
    return pack_examples(streams, recipe.shape(kind))


def packs(recipe: PackRecipe, start: int, stop: int, workers: int) -> Iterator[Pack]:
    """Packs number `start` to `stop - 1` in order; made ahead by workers, if there are any."""
    numbers = iter(range(start, stop))
    if not workers:
        yield from (make_pack(recipe, number) for number in numbers)
        return
    # spawned, since a fork of a process that runs JAX's threads may hang
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context)
    try:
        waiting = deque(
            pool.submit(make_pack, recipe, number)
            for number in itertools.islice(numbers, workers * AHEAD)
        )
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(
                pool.submit(make_pack, recipe, number) for number in itertools.islice(numbers, 1)
            )
    finally:
        pool.shutdown(cancel_futures=True)


def encode_example(
    turns: Sequence[Problem], tokenizer: Tokenizer, template: ChatTemplate
) -> Example:
    """A dialogue with its answers; to be learned are thoughts, close markers, answers and ends of
    turn.
    """
    ids = encode_pieces(turns, tokenizer, template)
    learned = [np.full(len(piece), number % 2 == 1) for number, piece in enumerate(ids)]
    return Example(np.array(list(itertools.chain(*ids)), np.int32), np.concatenate(learned))


def encode_pieces(
    turns: Sequence[Problem], tokenizer: Tokenizer, template: ChatTemplate
) -> list[list[int]]:
    """Prompts and completions in turn, encoded apart, as they are when the model is asked; the
    template's newline after the last is no part of it.
    """
    text, pieces = "", []
    for number, problem in enumerate(turns):
        asked = [*messages(*turns[:number]), *prompt_messages(problem)]
        prompt = template.render(asked)
        answered = messages(*turns[: number + 1])
        whole = template.render(answered, add_generation_prompt=False).removesuffix("\n")
        assert prompt.startswith(text), "a prompt does not begin as the turn before it ends"
        assert whole.startswith(prompt), "the answered turn does not begin as the prompt ends"
        pieces += [prompt[len(text) :], whole[len(prompt) :]]
        text = whole
    return [tokenizer.encode(piece) for piece in pieces]


def _examples(
    recipe: PackRecipe, numbers: Iterator[int], families: Sequence[str]
) -> Iterator[Example]:
    tokenizer, template = _text(recipe.folder)
    for number in numbers:
        turns = dialogue_at(number, recipe.split, seed=recipe.seed, families=families)
        yield encode_example(turns, tokenizer, template)


@cache  # one load a process
def _text(folder: str) -> tuple[Tokenizer, ChatTemplate]:
    return Tokenizer.load(folder), ChatTemplate.load(folder)
