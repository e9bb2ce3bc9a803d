"""Dialogues answered by the target itself, in lock-step and in token ids: what a drafter learns
from (spec/dspark 5.1).

All turns of a wave share one cache, so a turn runs only the ids that are new: the end of the answer
before it and the next question.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from minimax_jax.batch import Batch
from minimax_jax.cache import Cache
from minimax_jax.loaded import LoadedModel
from minimax_jax.sampling import SamplingParams, SamplingState
from minimax_jax.steps import DecodeOptions, DecodeState, bucket, decode, prefill
from rl.packing import Example

PREFILL_TOKENS = 65536  # in one step, all dialogues together
DECODE_STEPS = 16  # tokens a dispatch


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The ids of a dialogue's questions, each with all that stands between the answer before it and
    its own, and the seed that answers are drawn with.
    """

    pieces: list[list[int]]
    seed: int


@dataclass
class _Dialogue:
    """A dialogue under way. What is in `new` is not in the cache yet."""

    pieces: list[list[int]]
    tokens: list[int] = field(default_factory=list)
    learned: list[bool] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    going: bool = True

    def ask(self, limit: int) -> None:
        """Takes the next question, if there is one and its answer still fits."""
        fits = bool(self.pieces) and len(self.tokens) + len(self.pieces[0]) <= limit
        self.going = self.going and fits
        if not self.going:
            self.new = []
            return
        piece = self.pieces.pop(0)
        self.new = [*self.new, *piece]
        self.tokens += piece
        self.learned += [False] * len(piece)

    def hear(self, answer: list[int], stop_ids: tuple[int, ...]) -> None:
        """Takes the answer; one without an end is the dialogue's last."""
        self.tokens += answer
        self.learned += [True] * len(answer)
        self.going = bool(answer) and answer[-1] in stop_ids
        self.new = answer[-1:]


class Regeneration:
    """Waves of `rows` dialogues that one model answers at temperature 1; one size of everything, so
    that there is one compiled program of each step.
    """

    def __init__(self, loaded: LoadedModel, *, rows: int, answer_tokens: int):
        config, block = loaded.config, loaded.layout.block_size
        assert loaded.tokenizer is not None, "dialogues are made of text"
        self.loaded, self.rows, self.answer_tokens = loaded, rows, answer_tokens
        self.stop_ids = loaded.tokenizer.stop_ids
        self.width = -(-config.max_context // block)
        longest = 1 << (config.max_context - 1).bit_length()
        self.chunk = min(longest, max(block, bucket(PREFILL_TOKENS // rows)))

    def answer(self, asked: Sequence[Asked]) -> list[Example]:
        """Each dialogue with the target's answers, its last tokens the longest that was answered.

        Answers, their end markers included, are to be learned. A dialogue ends early when an answer
        does not end within `answer_tokens`, or the next would not fit the context. Raises
        ValueError when the first does not.
        """
        assert len(asked) <= self.rows, "more dialogues than a wave has rows"
        limit = self.loaded.config.max_context - self.answer_tokens
        longest = max(len(one.pieces[0]) for one in asked)
        if longest > limit:
            raise ValueError(
                f"a question of {longest} tokens and an answer of {self.answer_tokens} do not fit "
                f"the context of {self.loaded.config.max_context}"
            )
        dialogues = [_Dialogue(list(one.pieces)) for one in asked]
        unused = [SamplingParams()] * (self.rows - len(asked))
        params = [SamplingParams(seed=a.seed, stop_token_ids=self.stop_ids) for a in asked]
        sampling = SamplingState.of([*params, *unused])
        cache, self.table = self.loaded.pages(self.rows, self.width)
        positions = np.zeros(self.rows, np.int32)
        while True:
            for dialogue in dialogues:
                dialogue.ask(limit)
            if not any(dialogue.going for dialogue in dialogues):
                return [
                    Example(np.array(d.tokens, np.int32), np.array(d.learned)) for d in dialogues
                ]
            new = [dialogue.new for dialogue in dialogues] + [[]] * len(unused)
            cache, logits = self._read(cache, new, positions)
            positions += np.array([len(ids) for ids in new], np.int32)
            state = DecodeState(
                logits=logits,
                positions=jnp.asarray(positions),
                limits=jnp.asarray(positions + self.answer_tokens),
                running=jnp.asarray([bool(ids) for ids in new]),
            )
            cache, positions, answers = self._write(cache, state, sampling)
            for dialogue, answer in zip(dialogues, answers, strict=False):
                if dialogue.going:
                    dialogue.hear(answer, self.stop_ids)

    def _read(
        self, cache: Cache, new: list[list[int]], starts: np.ndarray
    ) -> tuple[Cache, jax.Array]:
        """Runs new ids of each dialogue from position `start` on; the logits after the last."""
        lengths = np.array([len(ids) for ids in new], np.int32)
        columns = max(self.chunk, -(-int(lengths.max()) // self.chunk) * self.chunk)
        tokens = np.zeros((self.rows, columns), np.int32)
        for row, ids in enumerate(new):
            tokens[row, : len(ids)] = ids
        within = np.arange(columns)
        positions = np.where(within < lengths[:, None], starts[:, None] + within, -1)
        logits = jnp.zeros((self.rows, self.loaded.config.vocab_size), jnp.float32)
        for first in range(0, columns, self.chunk):
            part = slice(first, first + self.chunk)
            last = lengths - 1 - first
            batch = Batch(
                tokens=jnp.asarray(tokens[:, part]),
                positions=jnp.asarray(positions[:, part], jnp.int32),
                block_table=self.table,
            )
            last = jnp.asarray(np.where((last >= 0) & (last < self.chunk), last, -1), jnp.int32)
            with self.loaded.on_mesh():
                cache, logits = prefill(
                    self.loaded.model, self.loaded.adapter, cache, batch, last, logits
                )
        return cache, logits

    def _write(
        self, cache: Cache, state: DecodeState, sampling: SamplingState
    ) -> tuple[Cache, np.ndarray, list[list[int]]]:
        """Samples until every answer has ended; how far the cache holds each dialogue then."""
        program = DecodeOptions(steps=DECODE_STEPS)
        parts, running = [], True
        while running:
            with self.loaded.on_mesh():
                cache, state, generated = decode(
                    self.loaded.model,
                    self.loaded.adapter,
                    cache,
                    self.table,
                    state,
                    sampling,
                    program,
                )
            parts.append(np.asarray(generated.tokens))
            running = bool(np.any(np.asarray(state.running & (state.positions < state.limits))))
        tokens = np.concatenate(parts).T
        answers = [[int(token) for token in row[row >= 0]] for row in tokens]
        return cache, np.array(state.positions), answers
