"""The time of an update: the gradient of one pack of sequences of one length, and AdamW.

The programs are those of training, compiled beforehand, so that several can be at once.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.rl import GRPOConfig
from minimax_jax.loaded import LoadedModel
from rl.bench.work import Measured, update_flops
from rl.experience import Experience, ExperiencePack, pack_experience
from rl.grpo_step import Program, accumulate, apply, pack_loss
from rl.optimizer import Parameters, TrainState
from rl.packing import PackShape

REPEATS = 5  # of which the median counts


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A pack of so many places, filled with sequences of a prompt and an answer."""

    places: int
    prompt: int  # tokens
    answer: int  # tokens

    @property
    def sequence(self) -> int:
        """Tokens of a sequence."""
        return self.prompt + self.answer

    def check(self, config: GRPOConfig, block_size: int) -> None:
        """Raises ValueError for a pack that no sequence fits, or that is no whole blocks."""
        places = self.places
        if places < self.sequence or places % block_size:
            raise ValueError(
                f"a pack of {places} places is no whole number of blocks of {block_size} that "
                f"holds {self.sequence} tokens"
            )

    def pack(self, loaded: LoadedModel, config: GRPOConfig) -> tuple[ExperiencePack, int]:
        """Random sequences, and how many."""
        size = loaded.layout.block_size
        shape = PackShape.of(self.sequence, self.places, size)
        count = shape.tiles // -(-self.sequence // size)
        weight = 1 / (count * self.answer)
        examples = [self._example(loaded, config, number, weight) for number in range(count)]
        return pack_experience(examples, shape)[0][0], count

    def _example(
        self, loaded: LoadedModel, config: GRPOConfig, number: int, weight: float
    ) -> Experience:
        """Random tokens and experts, pages of zeros, for what the config replays."""
        model, layout, rng = loaded.config, loaded.layout, np.random.default_rng(number)
        moe, tokens = model.moe, self.sequence
        lottery = rng.random((tokens - 1, sum(model.moe_layers), moe.num_experts), np.float32)
        chosen = lottery.argsort(axis=-1)[..., : moe.experts_per_token].astype(np.uint8)
        pages = np.zeros((-(-tokens // layout.block_size), layout.lines, 128), np.uint8)
        return Experience(
            tokens=rng.integers(0, model.num_tokens, tokens),
            logprobs=np.full(self.answer, -np.log(model.num_tokens), np.float32),
            advantage=(-1.0) ** number,
            weight=weight,
            choices=chosen if config.replay else None,
            pages=pages if config.replay_cache else None,
        )


class TimedUpdate:
    """An update whose programs `compile` makes and `measure` times; with `split` one of the forward
    pass alone, too.
    """

    def __init__(
        self, loaded: LoadedModel, config: GRPOConfig, state: TrainState, case: Packed, split: bool
    ):
        self._base, self._state, self._case = loaded.model, state, case
        self._program = Program(model=loaded.config, layout=loaded.layout, config=config)
        pack, self._count = case.pack(loaded, config)
        self.name = f"update {self._count} x ({case.prompt} + {case.answer}) in {case.places}"
        self._pack = jax.tree.map(jnp.asarray, pack)
        self._split = split
        self._compiled: dict[str, Any] = {}

    def compile(self) -> None:
        """Makes the programs that take long; any number of these may run at once."""
        parameters, base, pack = self._state.parameters, self._base, self._pack
        program = self._program
        lowered = {"gradient": accumulate.lower(self._zeros(), base, parameters, pack, program)}
        if self._split:
            forward = jax.jit(pack_loss, static_argnames=("program",))
            lowered["forward"] = forward.lower(parameters, base, pack, program)
        self._compiled = {name: one.compile() for name, one in lowered.items()}

    def measure(self) -> Measured:
        """The medians of gradient and optimiser; with `split` the gradient's two passes apart."""
        base, state, pack = self._base, self._state, self._pack
        run, parameters = self._compiled, state.parameters
        parts = {
            "gradient": self._median(lambda zeros: run["gradient"](zeros, base, parameters, pack)),
            "optimizer": self._median(lambda zeros: apply(state, zeros, self._program)),
        }
        seconds = sum(parts.values())
        if self._split:
            forward = self._median(lambda _: run["forward"](parameters, base, pack))
            parts |= {"forward": forward, "backward": parts.pop("gradient") - forward}
        case, program = self._case, self._program
        trained = program.config.trained
        return Measured(
            name=self.name,
            seconds=seconds,
            tokens=self._count * case.sequence,
            flops=update_flops(program.model, case.sequence, self._count, trained),
            bytes=0,
            parts=parts,
        )

    def _median(self, call: Callable[[Parameters], Any]) -> float:
        """Median seconds of a call, which may use up the zeros that it is given."""
        times = []
        for _ in range(REPEATS + 1):
            zeros = jax.block_until_ready(self._zeros())
            start = time.perf_counter()
            jax.block_until_ready(call(zeros))
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    def _zeros(self) -> Parameters:
        return jax.tree.map(jnp.zeros_like, self._state.parameters)
