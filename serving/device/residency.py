"""Which sequence is in which slot, and the updates that tell the device what a plan changes."""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from minimax_jax.chat import Tokenizer
from minimax_jax.sampling import SamplingParams as RowParams
from minimax_jax.sampling.masks import BITS
from serving.device import slots as updates
from serving.device.admitted import admitted, block_entries, edits_row, penalties_row
from serving.device.arrays import Resident
from serving.device.limits import LIMITS
from serving.device.programs import Call, Programs
from serving.device.row_params import row_params
from serving.device.slots import Slots
from serving.device_api import Mask
from serving.scheduling.plan import Admission, NewBlocks, RankPlan
from serving.scheduling.sampling_params import SamplingParams

BLOCK_ENTRIES = 256  # of block tables, in one update
MASK_ROWS = 8  # masks, in one update


class Residency:
    """The sequences of all slots. The device's slots themselves are passed in and given back."""

    def __init__(
        self,
        programs: Programs,
        slots: Slots,
        *,
        num_admitted: int,
        num_places: int,
        tokenizer: Tokenizer | None,
        place: Callable[[Any], Any],
    ):
        """At most `num_admitted` sequences come in with one plan, and a grammar's mask has at most
        `num_places` places.
        """
        self.residents: dict[int, Resident] = {}
        self._programs, self._tokenizer = programs, tokenizer
        self._num_slots, self._num_admitted = slots.num_slots, num_admitted
        assert slots.history.counts is not None
        self._vocab_size = slots.history.counts.shape[1]
        words = -(-self._vocab_size // BITS)
        self.masks: jax.Array = place(np.zeros((self._num_slots, num_places, words), np.uint32))

    def apply(self, slots: Slots, plan: RankPlan, masks: Mapping[int, Mask]) -> Slots:
        """The slots as the plan wants them; `masks` by slot."""
        for call in self._calls(plan):
            slots = self._programs.run(replace(call, args=(slots, *call.args)))
        some = sorted(masks)
        for first in range(0, len(some), MASK_ROWS):
            part = {slot: masks[slot] for slot in some[first : first + MASK_ROWS]}
            self.masks = self._programs.run(self._mask_call(part))
        return slots

    def warm_up_calls(self, slots: Slots) -> list[Call]:
        """A call of each program."""
        nobody = Resident(admission=_NOBODY, params=self._params_of(_NOBODY))
        no_block = NewBlocks(slot=self._num_slots, first=0, block_ids=[0])
        calls = [
            self._admit_call([]),
            *self._edit_calls(nobody, edits=True, penalties=True),
            *self._block_calls([no_block]),
        ]
        calls = [replace(call, args=(slots, *call.args)) for call in calls]
        return [*calls, self._mask_call({})]

    def check(self, sampling: SamplingParams) -> None:
        """Raises ValueError with a sentence for options that no row can have."""
        stop_ids, tokenizer = sampling.stop_token_ids, self._tokenizer
        params = row_params(sampling, seed=0, stop_ids=stop_ids, tokenizer=tokenizer)
        LIMITS.check(params, LIMITS.stop_ids - LIMITS.own)

    def _calls(self, plan: RankPlan) -> Iterator[Call]:
        """The updates of a plan, which take the slots as their first argument."""
        new = [Resident(admission=one, params=self._params_of(one)) for one in plan.admissions]
        self.residents |= {one.admission.slot: one for one in new}
        if new:
            yield self._admit_call(new)
        for one in new:
            has = one.params
            yield from self._edit_calls(one, edits=has.has_edits, penalties=has.has_penalties)
        yield from self._block_calls(plan.new_blocks)

    def _admit_call(self, new: Sequence[Resident]) -> Call:
        made = admitted(new, self._num_admitted, self._num_slots)
        return Call(name="admissions", step=updates.admit, args=(made,))

    def _edit_calls(self, resident: Resident, *, edits: bool, penalties: bool) -> Iterator[Call]:
        if edits:
            row = edits_row(resident, self._vocab_size)
            yield Call(name="edits", step=updates.set_edits, args=(row,))
        if penalties:
            row = penalties_row(resident, self._vocab_size)
            yield Call(name="penalties", step=updates.set_penalties, args=(row,))

    def _block_calls(self, new_blocks: Sequence[NewBlocks]) -> Iterator[Call]:
        for entries in block_entries(new_blocks, BLOCK_ENTRIES, self._num_slots):
            yield Call(name="block tables", step=updates.set_blocks, args=(entries,))

    def _mask_call(self, masks: Mapping[int, Mask]) -> Call:
        """At most `MASK_ROWS` masks; what a grammar's vocabulary lacks is not allowed."""
        at = np.full(MASK_ROWS, self._num_slots, np.int32)
        rows = np.zeros((MASK_ROWS, *self.masks.shape[1:]), np.uint32)
        for row, (slot, mask) in enumerate(masks.items()):
            at[row] = slot
            places, words = mask.shape
            rows[row, :places, :words] = mask
        return Call(name="masks", step=updates.set_masks, args=(self.masks, at, rows))

    def _params_of(self, admission: Admission) -> RowParams:
        params = row_params(
            admission.sampling,
            seed=admission.seed,
            stop_ids=admission.stop_ids,
            tokenizer=self._tokenizer,
        )
        LIMITS.check(params, LIMITS.stop_ids)
        return params


_NOBODY = Admission(
    slot=0,
    request_id="",
    index=0,
    tokens=array("i"),
    prompt_length=0,
    limit=0,
    sampling=SamplingParams(),
    seed=0,
    stop_ids=(),
    adapter=None,
)
