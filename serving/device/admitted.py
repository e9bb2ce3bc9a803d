"""Admissions as the arrays of `slots`, on the host."""

from collections.abc import Sequence

import numpy as np

from minimax_jax.sampling import packed_mask
from serving.device.arrays import Resident
from serving.device.limits import LIMITS
from serving.device.slots import Admitted, EditsRow, PenaltiesRow
from serving.scheduling.plan import NewBlocks


def admitted(new: Sequence[Resident], num_rows: int, num_slots: int) -> Admitted:
    """The settings of sequences that come in; `num_rows` at most."""
    params = [one.params for one in new]

    def column(values: Sequence[float], dtype: str, unused: int = 0) -> np.ndarray:
        padding = [unused] * (num_rows - len(values))
        return np.array([*values, *padding], dtype)

    stop_ids = np.full((num_rows, LIMITS.stop_ids), -1, np.int32)
    seed = np.zeros((num_rows, 2), np.uint32)
    for row, one in enumerate(params):
        stop_ids[row, : len(one.stop_token_ids)] = list(one.stop_token_ids)
        seed[row] = one.seed >> 32, one.seed & 0xFFFFFFFF
    return Admitted(
        slots=column([one.admission.slot for one in new], "i4", num_slots),
        limits=column([one.admission.limit for one in new], "i4"),
        temperature=column([one.temperature for one in params], "f4"),
        top_p=column([one.top_p for one in params], "f4", 1),
        top_k=column([max(0, one.top_k) for one in params], "i4"),
        min_p=column([one.min_p for one in params], "f4"),
        seed=seed,
        stop_ids=stop_ids,
    )


def edits_row(resident: Resident, vocab_size: int) -> EditsRow:
    """The edits of a sequence."""
    admission, params = resident.admission, resident.params
    allowed = np.ones((1, vocab_size), bool)
    if params.allowed_token_ids is not None:
        allowed[0] = np.isin(np.arange(vocab_size), params.allowed_token_ids)
    bias_ids = np.full((1, LIMITS.biases), -1, np.int32)
    biases = np.zeros((1, LIMITS.biases), np.float32)
    bias_ids[0, : len(params.logit_bias)] = list(params.logit_bias)
    biases[0, : len(params.logit_bias)] = list(params.logit_bias.values())
    words = np.full((1, LIMITS.words, LIMITS.word_length), -1, np.int32)
    for place, word in enumerate(params.bad_words):
        words[0, place, LIMITS.word_length - len(word) :] = list(word)
    generated = admission.tokens[admission.prompt_length :]
    recent = np.full((1, LIMITS.word_length - 1), -1, np.int32)
    last = generated[-(LIMITS.word_length - 1) :]
    recent[0, recent.shape[1] - len(last) :] = last
    return EditsRow(
        slot=np.array([admission.slot], np.int32),
        allowed=packed_mask(allowed),
        words=words,
        stops_from=np.array([admission.prompt_length + params.min_tokens], np.int32),
        bias_ids=bias_ids,
        biases=biases,
        recent=recent,
    )


def penalties_row(resident: Resident, vocab_size: int) -> PenaltiesRow:
    """The penalties of a sequence, and what they count so far."""
    params = resident.params
    prompt, generated = np.split(resident.tokens, [resident.admission.prompt_length])
    counts = np.bincount(generated, minlength=vocab_size).astype(np.int32)[None]
    is_there = np.bincount(prompt, minlength=vocab_size)[None] > 0
    one = {
        name: np.array([getattr(params, f"{name}_penalty")], np.float32)
        for name in ("repetition", "frequency", "presence")
    }
    return PenaltiesRow(
        slot=np.array([resident.admission.slot], np.int32),
        **one,
        prompt=packed_mask(is_there),
        counts=counts,
    )


def block_entries(new_blocks: Sequence[NewBlocks], size: int, num_slots: int) -> list[np.ndarray]:
    """Block-table entries (slot, index, block), `size` at a time."""
    entries = [
        (new.slot, new.first + i, block)
        for new in new_blocks
        for i, block in enumerate(new.block_ids)
    ]
    padding = [(num_slots, 0, 0)] * (-len(entries) % size)
    return list(np.array(entries + padding, np.int32).reshape(-1, size, 3))
