"""The door of the scheduler: what can never run is refused with a sentence, and what comes into a
slot is described for the device.
"""

from collections.abc import Sequence

from configs.serving import ServingConfig
from serving.scheduling.plan import Admission, NewBlocks, RankPlan
from serving.scheduling.rank import Rank
from serving.scheduling.request import Asked, Request, whole_prompt


class QueueFullError(RuntimeError):
    """Too many requests wait; this one may come again later."""


def checked(asked: Asked, config: ServingConfig, ranks: Sequence[Rank]) -> Asked:
    """What was asked, its prompt cut as it says; raises ValueError if it cannot ever run."""
    asked = whole_prompt(asked, config.max_model_len)
    sampling = asked.sampling
    if asked.priority and config.scheduling_policy != "priority":
        raise ValueError(
            f"priority={asked.priority} needs scheduling_policy='priority', which is "
            f"{config.scheduling_policy!r}"
        )
    if asked.rank is not None and not 0 <= asked.rank < len(ranks):
        raise ValueError(f"data rank {asked.rank} is not in 0..{len(ranks) - 1}")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(sampling, name)
        if value is not None and value > config.max_logprobs:
            raise ValueError(f"{name}={value} is more than max_logprobs={config.max_logprobs}")
    _check_room(asked, config, ranks[0].pages.num_blocks)
    return asked


def _check_room(asked: Asked, config: ServingConfig, num_blocks: int) -> None:
    """Raises unless the sequence fits into an empty pool with all that it may become."""
    prompt, most = len(asked.prompt), asked.sampling.max_tokens
    longest = config.max_model_len if most is None else min(prompt + most, config.max_model_len)
    if -(-longest // config.block_size) > num_blocks:
        raise ValueError(
            f"a prompt of {prompt} tokens that may grow to {longest} needs "
            f"{-(-longest // config.block_size)} blocks, but the pool has {num_blocks}: at most "
            f"{num_blocks * config.block_size} tokens fit"
        )


def entered(request: Request, plan: RankPlan) -> None:
    """Adds to the plan what the device has to know of a sequence that came into a slot."""
    plan.admissions.append(
        Admission(
            slot=request.slot,
            request_id=request.request_id,
            index=request.index,
            tokens=request.tokens[:],
            prompt_length=request.prompt_length,
            limit=request.limit,
            sampling=request.sampling,
            seed=request.seed,
            stop_ids=tuple(sorted(request.eos_or_stop_ids)),
            adapter=request.asked.adapter,
        )
    )
    plan.new_blocks.append(NewBlocks(slot=request.slot, first=0, block_ids=list(request.blocks)))
