"""The calls of the step programs, by shape: what is run, and what it is compiled for."""

from collections.abc import Collection, Sequence
from typing import Any

from configs.serving import ServingConfig
from serving.device.arrays import chunks, decode_rows
from serving.device.programs import Call
from serving.device.residency import Residency
from serving.device.sampler import Rows
from serving.device.steps import Chunks, State, decode, prefill
from serving.device.weights import ServedWeights
from serving.scheduling.plan import PrefillRow
from serving.scheduling.shapes import Shape


class StepCalls:
    """Puts the rows of a plan together with the weights and slots that they need."""

    def __init__(
        self, config: ServingConfig, weights: ServedWeights, residency: Residency, top: int
    ):
        """`top` is how many of the likeliest ids a step reports."""
        self._config, self._weights, self._residency, self._top = config, weights, residency, top

    def chunks(
        self, rows: Sequence[PrefillRow], shape: Shape, masked: Collection[int]
    ) -> tuple[Chunks, list[int]]:
        """Chunks of prompts, and the flat place where each begins; `masked` are slots with a
        grammar's mask.
        """
        return chunks(
            rows,
            self._residency.residents,
            masked,
            shape,
            block_size=self._config.block_size,
            num_slots=self._config.max_num_seqs,
        )

    def rows(self, slots: Sequence[int], shape: Shape, masked: Collection[int]) -> Rows:
        """Decode rows."""
        return decode_rows(
            slots,
            self._residency.residents,
            masked,
            num_rows=shape.rows,
            num_slots=self._config.max_num_seqs,
        )

    def prefill(self, state: State, made: Chunks, shape: Shape, adapter: str | None) -> Call:
        """A step of these chunks."""
        name = f"prefill of {shape.tokens} tokens, tables of {shape.pages} blocks"
        return self._call(name, prefill, state, shape, made, adapter)

    def decode(self, state: State, rows: Rows, shape: Shape, adapter: str | None) -> Call:
        """One device step of these rows."""
        name = f"decode of {shape.rows} rows, tables of {shape.pages} blocks"
        return self._call(name, decode, state, shape, rows, adapter)

    def empty(self, state: State, shape: Shape) -> Call:
        """A call of this shape without any sequence."""
        if shape.kind == "prefill":
            return self.prefill(state, self.chunks([], shape, ())[0], shape, None)
        return self.decode(state, self.rows([], shape, ()), shape, None)

    def _call(
        self, name: str, step: Any, state: State, shape: Shape, rows: Any, adapter: str | None
    ) -> Call:
        args = (self._weights.of(adapter), state, self._residency.masks, rows)
        static = {"tree": self._weights.tree, "pages": shape.pages, "top": self._top}
        return Call(name=name, step=step, args=args, static=static, donated=1)
