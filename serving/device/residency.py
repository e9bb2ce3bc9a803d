"""Which sequence is in which slot, and the updates that tell the device what a plan changes."""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from minimax_jax.chat import Tokenizer
from minimax_jax.sampling import SamplingParams as RowParams
from minimax_jax.sampling.masks import BITS
from serving.device import slots as updates
from serving.device.admitted import admitted, block_entries, edits_row, penalties_row
from serving.device.arrays import Resident, joined
from serving.device.limits import LIMITS
from serving.device.placement import kept_by_rank, on_each_rank
from serving.device.programs import Call
from serving.device.row_params import row_params
from serving.device_api import Mask, Slot
from serving.scheduling.plan import Admission, NewBlocks, RankPlan
from serving.scheduling.sampling_params import SamplingParams

BLOCK_ENTRIES = 256  # of a rank's block tables, in one update
MASK_ROWS = 8  # of a rank's masks, in one update


class Residency:
    """The sequences of all slots of all data ranks, as the host knows them."""

    def __init__(
        self,
        *,
        num_ranks: int,
        num_slots: int,
        num_admitted: int,
        num_places: int,
        vocab_size: int,
        tokenizer: Tokenizer | None,
    ):
        """Of each rank there are `num_slots`; at most `num_admitted` sequences come in with one
        plan, and a grammar's mask has at most `num_places` places.
        """
        self.residents: dict[Slot, Resident] = {}
        self.num_ranks, self.num_slots = num_ranks, num_slots
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._num_admitted, self._num_places = num_admitted, num_places
        nobody = replace(_NOBODY, slot=self.num_slots)
        self._nobody = Resident(admission=nobody, params=self._params_of(nobody))
        no_block = NewBlocks(slot=self.num_slots, first=0, block_ids=[0])
        [self._no_blocks] = block_entries([no_block], BLOCK_ENTRIES, self.num_slots)

    @property
    def mask_shape(self) -> tuple[int, int, int]:
        """Of the grammars' masks of all slots, uint32."""
        words = -(-self._vocab_size // BITS)
        return self.num_ranks * self.num_slots, self._num_places, words

    def update_calls(self, plans: Sequence[RankPlan], masks: Mapping[Slot, Mask]) -> Iterator[Call]:
        """What makes the slots and masks those that the plans of all ranks want. One call is for
        all ranks; those that have nothing there have a row of nobody.
        """
        yield from self._slot_calls(plans)
        own = [sorted(slot for of, slot in masks if of == rank) for rank in range(self.num_ranks)]
        for first in range(0, max(map(len, own)), MASK_ROWS):
            some = [rank_slots[first : first + MASK_ROWS] for rank_slots in own]
            yield self._mask_call(some, masks)

    def warm_up_calls(self) -> list[Call]:
        """A call of each program."""
        none = [[] for _ in range(self.num_ranks)]
        return [
            self._admit_call(none),
            self._edits_call([self._nobody] * self.num_ranks),
            self._penalties_call([self._nobody] * self.num_ranks),
            self._block_call([self._no_blocks] * self.num_ranks),
            self._mask_call(none, {}),
        ]

    def check(self, sampling: SamplingParams) -> None:
        """Raises ValueError with a sentence for options that no row can have."""
        stop_ids, tokenizer = sampling.stop_token_ids, self._tokenizer
        params = row_params(sampling, seed=0, stop_ids=stop_ids, tokenizer=tokenizer)
        LIMITS.check(params, LIMITS.stop_ids - LIMITS.own)

    def _slot_calls(self, plans: Sequence[RankPlan]) -> Iterator[Call]:
        new = [
            [Resident(admission=one, params=self._params_of(one)) for one in plan.admissions]
            for plan in plans
        ]
        if any(new):
            for rank, own in enumerate(new):
                self.residents |= {(rank, one.admission.slot): one for one in own}
            yield self._admit_call(new)
        edited = [[one for one in own if one.has_edits] for own in new]
        yield from map(self._edits_call, zip_longest(*edited, fillvalue=self._nobody))
        penalised = [[one for one in own if one.has_penalties] for own in new]
        yield from map(self._penalties_call, zip_longest(*penalised, fillvalue=self._nobody))
        entries = [block_entries(plan.new_blocks, BLOCK_ENTRIES, self.num_slots) for plan in plans]
        yield from map(self._block_call, zip_longest(*entries, fillvalue=self._no_blocks))

    def _admit_call(self, new: Sequence[Sequence[Resident]]) -> Call:
        made = [admitted(own, self._num_admitted, self.num_slots) for own in new]
        return _update("admissions", updates.admit, made)

    def _edits_call(self, some: Sequence[Resident]) -> Call:
        rows = [edits_row(one, self._vocab_size) for one in some]
        return _update("edits", updates.set_edits, rows)

    def _penalties_call(self, some: Sequence[Resident]) -> Call:
        rows = [penalties_row(one, self._vocab_size) for one in some]
        return _update("penalties", updates.set_penalties, rows)

    def _block_call(self, entries: Sequence[np.ndarray]) -> Call:
        return _update("block tables", updates.set_blocks, entries)

    def _mask_call(self, slots: Sequence[Sequence[int]], masks: Mapping[Slot, Mask]) -> Call:
        """At most `MASK_ROWS` masks of each rank; what a grammar's vocabulary lacks is not
        allowed.
        """
        at = np.full((self.num_ranks, MASK_ROWS), self.num_slots, np.int32)
        rows = np.zeros((*at.shape, *self.mask_shape[1:]), np.uint32)
        for rank, own in enumerate(slots):
            for row, slot in enumerate(own):
                at[rank, row] = slot
                places, words = masks[rank, slot].shape
                rows[rank, row, :places, :words] = masks[rank, slot]
        flat = at.reshape(at.size), rows.reshape(at.size, *rows.shape[2:])
        step = partial(_updated, updates.set_masks)
        return Call(name="masks", kind="masks", step=step, host=flat)

    def _params_of(self, admission: Admission) -> RowParams:
        params = row_params(
            admission.sampling,
            seed=admission.seed,
            stop_ids=admission.stop_ids,
            tokenizer=self._tokenizer,
        )
        LIMITS.check(params, LIMITS.stop_ids)
        return params


def _update(name: str, step: Callable[..., Any], of_ranks: Sequence[Any]) -> Call:
    """An update of the slots of all ranks with what each rank has for it."""
    made = joined(of_ranks)
    return Call(name=name, kind="slots", step=partial(_updated, step), host=(made,))


def _updated(step: Callable[..., Any], kept: Any, *new: Any) -> Any:
    return kept_by_rank(on_each_rank(step)(kept, *new))


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
