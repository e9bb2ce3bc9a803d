"""The grammars of running sequences: compiled on threads before a request enters, then for each
step the masks of its next tokens, made on threads while the device runs another step.

The engine's thread alone moves a sequence on; at most one thread at a time works on its matcher.
"""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from minimax_jax.chat import Tokenizer
from minimax_jax.chat.dialects import M3, Dialect
from serving.device_api import Mask
from serving.grammar.grammars import GrammarLimits, Grammars
from serving.grammar.mask_workers import MaskWorkers, PendingMasks
from serving.grammar.matcher import GrammarMatcher
from serving.grammar.source import Thought, thought_after
from serving.grammar.vocabulary import GrammarVocabulary
from serving.scheduling.request import Asked, Request

PROMPT_END = 32  # tokens that are read to see whether a reply begins inside a thought
NUM_COMPILERS = 2  # threads; a grammar takes milliseconds, and a large one fractions of a second
MAX_MASK_THREADS = 8


class GrammarDesk:
    """Compiles what requests ask for and makes masks, on threads of its own."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        *,
        waits_for_thought: bool = True,
        limits: GrammarLimits | None = None,
        dialect: Dialect = M3,
    ):
        self._tokenizer, self._dialect = tokenizer, dialect
        self._waits_for_thought = waits_for_thought
        self.vocabulary = GrammarVocabulary(tokenizer, vocab_size)
        self._grammars = Grammars(self.vocabulary, limits, dialect)
        self._compilers = ThreadPoolExecutor(NUM_COMPILERS, thread_name_prefix="grammar-compile")
        spare = max(1, (os.cpu_count() or 2) - 1)
        self._workers = MaskWorkers(min(spare, MAX_MASK_THREADS))

    @property
    def num_compiled(self) -> int:
        """Grammars that were compiled since the start."""
        return self._grammars.num_compiled

    def compile(self, asked: Asked) -> Future[list[GrammarMatcher]]:
        """Begins to compile; one matcher for each of the n sequences, or ValueError."""
        return self._compilers.submit(self._matchers, asked)

    def row(self, matcher: GrammarMatcher, request: Request) -> "GrammarRow":
        """Where a sequence begins in its grammar."""
        return GrammarRow(matcher, request, self.vocabulary, self._workers)

    def close(self) -> None:
        """Ends the threads."""
        self._compilers.shutdown(wait=True, cancel_futures=True)
        self._workers.close()

    def _matchers(self, asked: Asked) -> list[GrammarMatcher]:
        output, sampling = asked.sampling.structured_outputs, asked.sampling
        assert output is not None
        thought = Thought.OVER
        if self._waits_for_thought:
            end = self._tokenizer.decode(asked.prompt[-PROMPT_END:])
            thought = thought_after(end, self._dialect)
        stops = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else asked.eos_token_ids))
        make = partial(self._grammars.matcher, output, thought, stops)
        return [make() for _ in range(sampling.n)]


class GrammarRow:
    """A sequence in its grammar, with the masks of its next step on their way."""

    def __init__(
        self,
        matcher: GrammarMatcher,
        request: Request,
        vocabulary: GrammarVocabulary,
        workers: MaskWorkers,
    ):
        self._matcher, self._request, self._workers = matcher, request, workers
        # Without a stop of its own a sequence goes on for as long as the grammar lets it.
        stops = [] if request.eos_or_stop_ids else list(vocabulary.eos_ids)
        self._avoided = vocabulary.mask_of(stops) if stops else None
        self._free = vocabulary.valid
        self._num_drafts = 0
        self._pending = self._begin(())

    @property
    def max_width(self) -> int:
        """Drafts that its next step may test. None while stops are forbidden that the grammar may
        demand: the place of such a stop is known between steps alone.
        """
        early = self._request.num_tokens < self._request.least_length
        return 0 if early else self._num_drafts

    def advance(self, tokens: Sequence[int], drafts: Sequence[int]) -> int | None:
        """Takes the tokens of a step and begins the masks of the next, which tests the drafts.

        How many tokens there are where the grammar ends but nothing else would end the sequence;
        else None. ValueError when a token is not the grammar's.
        """
        length = self._request.num_tokens - len(tokens)
        for count, token in enumerate(tokens, start=1):
            self._matcher.advance([token])
            if self._matcher.must_stop and not self._can_stop(length + count):
                return count
        self._num_drafts = len(drafts)
        self._pending = self._begin(drafts)
        return None

    def masks(self, width: int) -> Mask:
        """The masks of a step that tests so many drafts; waits for them. RuntimeError when the
        grammar has outgrown its limits.
        """
        (masks,) = self._pending.wait()
        if isinstance(masks, RuntimeError):
            raise masks
        masks = masks[: width + 1]
        if self._avoided is None:
            return masks
        others = masks & ~self._avoided
        return np.where(others.any(axis=-1, keepdims=True), others, masks)

    def any_token(self, width: int) -> Mask:
        """Masks that bind nothing, for a step whose tokens are thrown away."""
        return np.tile(self._free, (width + 1, 1))

    def _begin(self, drafts: Sequence[int]) -> PendingMasks:
        return self._workers.begin([(self._matcher, drafts)])

    def _can_stop(self, length: int) -> bool:
        """Whether the token after so many may be one that ends the sequence."""
        return bool(self._request.eos_or_stop_ids) and length >= self._request.least_length
