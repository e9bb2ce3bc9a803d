"""The three losses of a drafter and what they say of acceptance, as sums: every mean has one
denominator over all blocks, wherever they were computed (spec/dspark 5.3).

A block's row k proposes the token k + 1 places after its anchor. Rows past the end of what the
target said are not valid and count nowhere.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from configs.drafter_training import DrafterTrainingConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rows:
    """What is known of the T rows of A blocks. Logits are those of temperature 1, the drafter's
    with its Markov bias; `confidence` is a logit.
    """

    draft: Float[Array, "A T V"]
    target: Float[Array, "A T V"]
    labels: Int[Array, "A T"]
    valid: Bool[Array, "A T"]
    confidence: Float[Array, "A T"] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LossSums:
    """Sums over blocks, which add up across chunks and devices; several parts may lie in one."""

    ce: Float[Array, "*parts"]  # these three of w x loss,
    tv: Float[Array, "*parts"]
    confidence: Float[Array, "*parts"]
    weight: Float[Array, "*parts"]  # and w itself
    accepted: Float[Array, "*parts T"]  # sum_v min(q, p) of each position's valid rows
    rows: Float[Array, "*parts T"]
    survived: Float[Array, "*parts T"]  # the product of `accepted` up to here
    confidence_error: Float[Array, "*parts"]  # |sigmoid(confidence) - min(q, p)|
    blocks: Float[Array, "*parts"]


def loss_sums(rows: Rows, decay: float) -> LossSums:
    """The sums of some blocks; row k weighs exp(-k / decay). The confidence's label is detached."""
    p = jax.nn.softmax(rows.target, axis=-1)
    log_q = jax.nn.log_softmax(rows.draft, axis=-1)
    distance = jnp.sum(jnp.abs(jnp.exp(log_q) - p), axis=-1)
    ce = -jnp.take_along_axis(log_q, rows.labels[..., None], axis=-1)[..., 0]
    kept = jax.lax.stop_gradient(1.0 - 0.5 * distance)
    valid = rows.valid.astype(jnp.float32)
    w = jnp.exp(-jnp.arange(valid.shape[1]) / decay) * valid
    logit = jnp.zeros_like(kept) if rows.confidence is None else rows.confidence
    entropy = jax.nn.softplus(logit) - kept * logit  # -c log s - (1 - c) log(1 - s), s = sigmoid
    error = jnp.abs(jax.nn.sigmoid(logit) - kept)
    return LossSums(
        ce=jnp.sum(w * ce),
        tv=jnp.sum(w * distance),
        confidence=jnp.sum(w * entropy),
        weight=jnp.sum(w),
        accepted=jnp.sum(valid * kept, axis=0),
        rows=jnp.sum(valid, axis=0),
        survived=jnp.sum(jnp.cumprod(valid * kept, axis=1), axis=0),
        confidence_error=jnp.sum(valid * error),
        blocks=jnp.sum(valid[:, 0]),
    )


def total_loss(sums: LossSums, config: DrafterTrainingConfig) -> Float[Array, ""]:
    """The weighted mean of the three losses over everything that was summed."""
    weighted = config.ce_weight * sums.ce + config.tv_weight * sums.tv
    weighted += config.confidence_weight * sums.confidence
    return weighted / jnp.maximum(sums.weight, 1e-9)


def metrics_of(sums: LossSums) -> dict[str, Array]:
    """Means by name. `acceptance_rate` is each position's own, given the true tokens before it;
    `survival` is the share of blocks kept up to there, and 1 plus its sum the expected
    `acceptance_length`. Blocks that the end of an answer cuts count as they would be served: their
    missing drafts are not kept.
    """
    weight, blocks = jnp.maximum(sums.weight, 1e-9), jnp.maximum(sums.blocks, 1.0)
    survival = sums.survived / blocks
    return {
        "ce": sums.ce / weight,
        "tv": sums.tv / weight,
        "confidence_loss": sums.confidence / weight,
        "confidence_error": sums.confidence_error / jnp.maximum(jnp.sum(sums.rows), 1.0),
        "acceptance_rate": sums.accepted / jnp.maximum(sums.rows, 1.0),
        "survival": survival,
        "acceptance_length": 1.0 + jnp.sum(survival),
        "blocks": sums.blocks,
    }
