"""What a run would have been with another number of tokens a verification step.

Published figures of speculative decoding are often made with a synthetic acceptance: the engine
accepts drafts by chance so that a step commits a given mean, whatever the text. Here nothing is
forced. From the answers' counts of accepted drafts follows how many steps they took, and with it
the measured time a step; the projection lets each step commit `length` tokens in place of what it
did. Times to the first token stay. It is an estimate, marked as synthetic wherever it stands.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from serving.bench.answers import Answer
from serving.bench.summary import MS

Result = dict[str, Any]


def acceptance(answers: Sequence[Answer]) -> Result:
    """vLLM's keys: the percentage of drafts accepted, and tokens a step, the step's own included.

    Nothing but None where no drafts were made. An answer's first token comes from its prompt.
    """
    drafted = sum(one.draft_tokens for one in answers)
    accepted = sum(one.accepted_tokens for one in answers)
    return {
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_acceptance_rate": 100 * accepted / drafted if drafted else None,
        "spec_decode_acceptance_length": tokens_per_step(answers) if drafted else None,
    }


def tokens_per_step(answers: Sequence[Answer]) -> float:
    """Tokens after the first ones over the steps that made them; a step makes one more than it
    accepts.
    """
    tokens = sum(max(one.output_tokens - 1, 0) for one in answers)
    accepted = sum(min(one.accepted_tokens, max(one.output_tokens - 2, 0)) for one in answers)
    return tokens / (tokens - accepted) if tokens else 1.0


def projected(
    answers: Sequence[Answer], length: float, *, duration: float, is_closed: bool, users: int
) -> Result:
    """The figures with `length` tokens a step, under keys that begin with `synthetic_`.

    In a closed loop, of `users` at a time, the run is shorter by the time they save; in an open one
    the arrivals decide how long it takes.
    """
    note = f"SYNTHETIC: projected to {length:g} tokens a verification step, not measured"
    result: Result = {"synthetic_acceptance_length": length, "synthetic_note": note}
    if not any(one.draft_tokens for one in answers):
        reason = "no projection: the answers report no drafts, so what a step costs is unknown"
        return result | {"synthetic_note": f"SYNTHETIC: {reason}"}
    factor = tokens_per_step(answers) / length
    tpots = np.array([one.tpot * factor for one in answers if one.tpot > 0])
    saved = sum((one.e2el - one.ttft) * (1 - factor) for one in answers)
    mean_running = sum(one.e2el for one in answers) / duration
    shorter = saved / max(users, mean_running) if is_closed else 0.0
    tokens = sum(one.output_tokens for one in answers)
    return result | {
        "synthetic_median_tpot_ms": float(np.median(tpots)) * MS,
        "synthetic_median_tokens_per_s_per_user": float(np.median(1 / tpots)),
        "synthetic_output_throughput": tokens / (duration - shorter),
    }
