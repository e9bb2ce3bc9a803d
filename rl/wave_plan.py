"""Where a wave of rollouts keeps its keys: the samples of a prompt share the prompt's whole rows of
the pool; the row that the prompt only begins is copied for each. A row is a block, or several where
ranks share out a context.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from minimax_jax.steps import bucket


@dataclass(frozen=True, kw_only=True)
class WavePlan:
    """The rows of P prompts and of their P x G samples in one pool, -1 where there is none, and
    what is copied once the prompts are in their rows. Data ranks share prompts and samples in
    order, and each counts its rows from 0.
    """

    lengths: Int[np.ndarray, "P"]
    prompt_table: Int[np.ndarray, "P Wp"]
    sample_table: Int[np.ndarray, "S W"]
    copy_from: Int[np.ndarray, "S"]
    copy_to: Int[np.ndarray, "S"]
    num_rows: int

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        samples: int,
        max_tokens: int,
        row_tokens: int,
        *,
        least: int,
        data_ranks: int = 1,
    ) -> "WavePlan":
        """The plan for prompts of these lengths; a row of length 0 is unused. Tables are at least
        `least` wide.
        """
        assert len(lengths) % data_ranks == 0, "data ranks have equal numbers of prompts"
        L, P = np.asarray(lengths), len(lengths) // data_ranks  # prompts of a rank
        shared, begun = np.divmod(L, row_tokens)  # whole rows; tokens in the row after them
        width = bucket(int(-(-L.max() // row_tokens)), smallest=least)
        own = -(-(row_tokens - 1 + max_tokens) // row_tokens)
        prompt_table = np.arange(len(L) * width).reshape(len(L), width) % (P * width)
        S = len(L) * samples
        own_rows = P * width + np.arange(S * own).reshape(S, own) % (P * samples * own)
        widest = bucket(int(shared.max()) + own, smallest=least)
        table = np.full((S, widest), -1, np.int32)
        for row in range(S):
            first = shared[row // samples]
            table[row, :first] = prompt_table[row // samples, :first]
            table[row, first : first + own] = own_rows[row]
        copied = np.repeat(np.minimum(shared, width - 1), samples)
        source = prompt_table[np.arange(S) // samples, copied]
        return cls(
            lengths=L.astype(np.int32),
            prompt_table=prompt_table.astype(np.int32),
            sample_table=table,
            # a prompt that ends with its row has nothing to copy: its sample's row onto itself
            copy_from=np.where(np.repeat(begun > 0, samples), source, own_rows[:, 0]),
            copy_to=own_rows[:, 0],
            num_rows=P * (width + samples * own),
        )
