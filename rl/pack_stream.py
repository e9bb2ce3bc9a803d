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
from rl.data import LONG, SHORT, Problem, messages, problem_at, prompt_messages
from rl.packing import Example, Pack, PackShape, pack_examples

SHORT_TOKENS = 128  # a short problem, thought and answer included
LONG_MIX = (
    LONG[0],
    LONG[0],
    *LONG[1:],
)  # the shorter ledgers twice as often: looking up is learnt there
PROBLEMS_A_PACK = 1 << 20  # numbers reserved for each pack; more than any pack holds
AHEAD = 2  # packs in the making for each worker


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
    long_fraction: float
    long_steps: int

    def shape(self, long: bool) -> PackShape:
        """The shape of a kind of pack; the two differ in the width of the block table."""
        tokens = self.max_context if long else min(SHORT_TOKENS, self.max_context)
        blocks = -(-tokens // self.block_size)
        return PackShape(tiles=self.tiles, tile_tokens=self.block_size, blocks=blocks)

    def is_long(self, number: int) -> bool:
        """Whether pack `number` holds long problems: the first `long_steps`, then evenly a share of
        `long_fraction`.
        """
        return number < self.long_steps or int((number + 1) * self.long_fraction) > int(
            number * self.long_fraction
        )


def make_pack(recipe: PackRecipe, number: int) -> Pack:
    """Pack `number`: short problems, or long ones with short ones in what they leave free."""
    numbers = itertools.count(number * PROBLEMS_A_PACK)
    long = recipe.is_long(number)
    mixes = (LONG_MIX, SHORT) if long else (SHORT,)
    streams = (_examples(recipe, numbers, families) for families in mixes)
    return pack_examples(streams, recipe.shape(long))


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


def encode_example(problem: Problem, tokenizer: Tokenizer, template: ChatTemplate) -> Example:
    """Prompt and completion encoded apart, as they are when the model is asked; the loss covers
    thought, close marker, answer and end of turn, and the template's newline after it is no part of
    the example.
    """
    prompt = template.render(prompt_messages(problem))
    text = template.render(messages(problem), add_generation_prompt=False)
    assert text.startswith(prompt), "the answered turn does not begin as the prompt ends"
    prompt_ids = tokenizer.encode(prompt)
    answer_ids = tokenizer.encode(text[len(prompt) :].removesuffix("\n"))
    return Example(np.array([*prompt_ids, *answer_ids], np.int32), len(prompt_ids))


def _examples(
    recipe: PackRecipe, numbers: Iterator[int], families: Sequence[str]
) -> Iterator[Example]:
    tokenizer, template = _text(recipe.folder)
    for number in numbers:
        problem = problem_at(number, recipe.split, seed=recipe.seed, families=families)
        yield encode_example(problem, tokenizer, template)


@cache  # one load a process
def _text(folder: str) -> tuple[Tokenizer, ChatTemplate]:
    return Tokenizer.load(folder), ChatTemplate.load(folder)
