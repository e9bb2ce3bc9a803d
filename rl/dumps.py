"""Answers written out to be read, one JSON object each."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from minimax_jax.chat import Tokenizer
from rl.batches import Group


def dump_groups(
    path: Path, groups: Sequence[Group], advantages: np.ndarray, tokenizer: Tokenizer | None
) -> None:
    """Prompt, answer with its thought, reward, score and advantage of each sample."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for group, row in zip(groups, advantages, strict=True):
        for i, (rollout, answer) in enumerate(zip(group.rollouts, group.answers, strict=True)):
            reward = float(group.rewards[i])
            record = {
                "prompt": group.question.messages,
                "right_answer": group.question.answer,
                "thought": answer.thought,
                "answer": answer.text,
                "finish": rollout.finish,
                "reward": reward if np.isfinite(reward) else None,
                "score": float(group.scores[i]) if np.isfinite(reward) else None,
                "advantage": float(row[i]),
                "tokens": len(rollout.tokens),
                "mean_logprob": float(rollout.logprobs.mean()) if rollout.tokens else None,
                "version": rollout.version,
            }
            if tokenizer is not None:
                record["text"] = tokenizer.decode(list(rollout.tokens))
            lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    path.write_text("".join(lines), "utf-8")
