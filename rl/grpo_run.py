"""A GRPO run: config, model, folder, reward and rollout; and what a resumed run may not change."""

from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax

from configs.parallel import ParallelConfig
from configs.rl import GRPOConfig
from minimax_jax.loaded import LoadedModel, load
from rl.batches import Asker
from rl.grading import Grader
from rl.grpo_step import Program
from rl.local_rollout import LocalRollout
from rl.math_answers import check_math_verify
from rl.packing import PackShape
from rl.placement import Places
from rl.policy import initial_parameters
from rl.questions import Question, Questions, measured_questions, training_questions
from rl.rewards import REWARDS, RewardFn
from rl.rollouts import RolloutFn
from rl.sft_step import DTYPES
from rl.sinks import check_sinks
from sharding.mesh import make_mesh
from sharding.rules import SERVE, with_parallel

# Fields up to `seed` may not change when a run is resumed, except these.
FREE = ("steps", "learning_rate", "warmup_steps", "decay_fraction", "reward_workers", "wave")


@dataclass(frozen=True)  # compared by identity of its parts
class GRPORun:
    """What to train, on what, and where to. `reward` and `rollout` are any functions of their
    kind.
    """

    config: GRPOConfig
    loaded: LoadedModel
    out: Path
    reward: RewardFn
    rollout: RolloutFn

    def __post_init__(self) -> None:
        config, model = self.config, self.loaded.config
        block, context = model.indexer.block_size, model.max_context
        if self.loaded.tokenizer is None or self.loaded.template is None:
            raise ValueError(f"{self.loaded.folder} has no tokenizer or no chat template")
        if config.max_tokens >= context:
            raise ValueError(
                f"max_tokens={config.max_tokens} leaves nothing of a context of {context}"
            )
        if config.pack_tokens % block:
            raise ValueError(
                f"pack_tokens={config.pack_tokens} is not a multiple of block_size={block}"
            )

    @cached_property
    def questions(self) -> Questions:
        """What is trained on."""
        return training_questions(self.config.data, self.config.seed)

    @cached_property
    def measured(self) -> list[Question]:
        """What is asked in an evaluation."""
        return measured_questions(self.config.eval_data, self.config.eval_problems)

    def check_data(self) -> None:
        """Raises ValueError for questions, of training or of evaluation, that are not there."""
        if not self.measured or not self.questions.identity:
            raise ValueError(f"{self.config.eval_data} holds no questions")

    def asker(self, grader: Grader) -> Asker:
        """What asks for its batches."""
        return Asker(
            config=self.config,
            loaded=self.loaded,
            rollout=self.rollout,
            grader=grader,
            questions=self.questions,
        )

    @property
    def fixed(self) -> dict[str, Any]:
        """What a resumed run may not change."""
        names = [field.name for field in fields(self.config)]
        decisive = names[: names.index("seed") + 1]
        values = {name: getattr(self.config, name) for name in decisive if name not in FREE}
        return {**values, "questions": self.questions.identity}

    @property
    def program(self) -> Program:
        """What its updates are compiled for."""
        return Program(
            model=self.loaded.config,
            layout=self.loaded.layout,
            config=self.config,
            places=self.places,
        )

    @cached_property
    def places(self) -> Places:
        """Where on the mesh what is trained lies."""
        shapes = jax.eval_shape(partial(initial_parameters, self.loaded, self.config))
        return Places.of(self.loaded.model, shapes, ParallelConfig.parse(self.config.parallel))

    def pack_shape(self, longest: int) -> PackShape:
        """The packs for answers of at most `longest` tokens, prompts included."""
        return PackShape.of(longest, self.config.pack_tokens, self.loaded.layout.block_size)


def start_run(
    config: GRPOConfig,
    out: Path,
    *,
    loaded: LoadedModel | None = None,
    reward: RewardFn | None = None,
    rollout: RolloutFn | None = None,
) -> GRPORun:
    """A run with the config's model, reward and the local rollout, or with those given.

    Raises ValueError before anything is loaded where it can be told then.
    """
    check_sinks(config)
    if reward is None and config.reward == "math":
        check_math_verify()
    if loaded is None:
        loaded = _loaded(config)
    return GRPORun(
        config=config,
        loaded=loaded,
        out=out,
        reward=reward or REWARDS[config.reward],
        rollout=rollout or LocalRollout(loaded=_rollout_model(loaded, config), wave=config.wave),
    )


def _loaded(config: GRPOConfig) -> LoadedModel:
    """The config's model on the config's mesh."""
    parallel = ParallelConfig.parse(config.parallel)
    mesh = make_mesh(parallel) if parallel.num_devices > 1 else None
    return load(
        config.model,
        dtype=DTYPES[config.dtype],
        mesh=mesh,
        rules=with_parallel(SERVE, parallel),
        speculative=config.rollout_speculative,
    )


def _rollout_model(loaded: LoadedModel, config: GRPOConfig) -> LoadedModel:
    """The model as the rollout sees it: with another cache, if a mismatch is to be studied."""
    if config.rollout_cache is None:
        return loaded
    formats = replace(loaded.formats, kv=config.rollout_cache, index=config.rollout_cache)
    return replace(loaded, formats=formats)
