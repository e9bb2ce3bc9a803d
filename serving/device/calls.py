"""The calls of the step programs, by shape: what is run, and what it is compiled for."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from configs.serving import ServingConfig
from minimax_jax.speculative.drafting import DraftMethod
from minimax_jax.speculative.steps import SpeculationOptions
from serving.device.arrays import chunks, decode_rows
from serving.device.programs import Call
from serving.device.residency import Residency
from serving.device.sampler import Rows
from serving.device.speculative_step import DraftRows, speculative
from serving.device.steps import Chunks, decode, prefill
from serving.device.weights import ServedWeights
from serving.device_api import Slot
from serving.scheduling.plan import PrefillRow
from serving.scheduling.shapes import Shape


class StepCalls:
    """Makes calls of the rows of a plan."""

    def __init__(
        self,
        config: ServingConfig,
        weights: ServedWeights,
        residency: Residency,
        *,
        block_size: int,
        top: int,
        method: DraftMethod | None,
        num_places: int,
    ):
        """`block_size` is the model's, `top` how many of the likeliest ids a step reports, `method`
        how drafts are drawn, None if nothing speculates; a row has `num_places` with its drafts.
        """
        self._config, self._weights, self._residency = config, weights, residency
        self._block_size, self._top, self._num_places = block_size, top, num_places
        self._method: DraftMethod | None = method
        self._records = config.enable_return_routed_experts

    @property
    def speculates(self) -> bool:
        """Whether decode rows may test drafts; steps that draw none are plain ones."""
        return self._method is not None

    def chunks(
        self, rows: Sequence[Sequence[PrefillRow]], shape: Shape, masked: Collection[Slot]
    ) -> tuple[Chunks, list[list[int]]]:
        """Chunks of each data rank's prompts, and the flat place where each begins; `masked` are
        slots with a grammar's mask.
        """
        return chunks(
            rows,
            self._residency.residents,
            masked,
            shape,
            block_size=self._block_size,
            num_slots=self._residency.num_slots,
        )

    def rows(self, slots: Sequence[Sequence[int]], shape: Shape, masked: Collection[Slot]) -> Rows:
        """Decode rows of each data rank."""
        return decode_rows(
            slots,
            self._residency.residents,
            masked,
            num_rows=shape.rows,
            num_slots=self._residency.num_slots,
        )

    def prefill(self, made: Chunks, shape: Shape, adapter: str | None) -> Call:
        """A step of these chunks."""
        name = f"prefill of {shape.tokens} tokens, tables of {shape.pages} blocks"
        static = {"top": self._top, "method": self._method, "records": self._records}
        return self._call(name, prefill, shape, made, adapter, static)

    def decode(self, rows: Rows, shape: Shape, adapter: str | None) -> Call:
        """One device step of these rows."""
        name = f"decode of {shape.rows} rows, tables of {shape.pages} blocks"
        static = {"top": self._top, "records": self._records}
        return self._call(name, decode, shape, rows, adapter, static)

    def speculative(
        self,
        rows: Rows,
        widths: Sequence[Sequence[int]],
        shape: Shape,
        adapter: str | None,
        *,
        with_options: bool,
    ) -> Call:
        """One step of these rows that tests so many of their drafts.

        Where there are several data ranks each row has places for all its drafts, since rows that
        are packed would not stay with their ranks.
        """
        assert self._method is not None
        ranks, tokens = self._residency.num_ranks, shape.tokens
        if ranks > 1:
            tokens = ranks * shape.rows * self._num_places
        options = SpeculationOptions(
            rows=tokens,
            method=self._method,
            top_logprobs=self._top if with_options else 0,
            records=self._records,
        )
        padded = np.zeros((ranks, shape.rows), np.int32)
        for rank, own in enumerate(widths):
            padded[rank, : len(own)] = own
        name = (
            f"speculation of {shape.rows} rows and {tokens} tokens, tables of {shape.pages} "
            f"blocks, {'any' if with_options else 'no'} options"
        )
        static = {"options": options, "with_options": with_options}
        drafting = DraftRows(rows=rows, widths=padded.reshape(padded.size))
        return self._call(name, speculative, shape, drafting, adapter, static)

    def empty(self, shape: Shape) -> list[Call]:
        """The calls of this shape, without any sequence."""
        none = [[] for _ in range(self._residency.num_ranks)]
        if shape.kind == "prefill":
            return [self.prefill(self.chunks(none, shape, ())[0], shape, None)]
        rows, calls = self.rows(none, shape, ()), []
        if self._method is None or self._config.speculation_costs is not None:
            calls.append(self.decode(rows, shape, None))
        if self._method is not None:
            calls += [
                self.speculative(rows, none, shape, None, with_options=some)
                for some in (False, True)
            ]
        return calls

    def _call(
        self,
        name: str,
        step: Any,
        shape: Shape,
        rows: Any,
        adapter: str | None,
        static: dict[str, Any],
    ) -> Call:
        static = {"tree": self._weights.tree, "pages": shape.pages, **static}
        return Call(name=name, kind="rows", step=step, host=(rows,), static=static, adapter=adapter)
