"""A batch to learn from: questions asked, answers drawn and rewarded, groups compared.

The rollout, the reward and the questions are functions and numbers from outside; nothing here knows
how an answer is computed.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from configs.rl import GRPOConfig
from minimax_jax.chat import Chat, ChatFormat, Prompt
from minimax_jax.loaded import LoadedModel
from rl.advantages import has_spread
from rl.answers import answer_of
from rl.grading import Grader
from rl.policy import Policy
from rl.questions import Question, Questions
from rl.rewards import Answer, Shaping
from rl.rollouts import Rollout, RolloutFn, RolloutRequest, check_rollouts


@dataclass(frozen=True, kw_only=True)
class Group:
    """A question's answers; `rewards` are NaN where there is none, `scores` are what advantages
    are made of.
    """

    question: Question
    rollouts: list[Rollout]
    answers: list[Answer]
    rewards: np.ndarray
    scores: np.ndarray

    @property
    def valid(self) -> np.ndarray:
        """Which answers were rewarded and not broken off."""
        whole = [rollout.finish != "aborted" for rollout in self.rollouts]
        return np.isfinite(self.rewards) & np.array(whole)

    @property
    def accuracy(self) -> np.ndarray:
        """1.0 for a right answer."""
        return (np.nan_to_num(self.rewards) > 0).astype(float)


@dataclass(kw_only=True)
class Batch:
    """The groups of a step, the position in the data after them, and what it took."""

    groups: list[Group]
    position: int
    asked: int = 0  # groups, those included that taught nothing and were left out
    faults: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: {"gen": 0.0, "reward": 0.0})


@dataclass(frozen=True, kw_only=True)
class Asker:
    """What stays the same while batches are asked for."""

    config: GRPOConfig
    loaded: LoadedModel
    rollout: RolloutFn
    grader: Grader
    questions: Questions

    def batch(self, policy: Policy, position: int) -> Batch:
        """The next batch from a position in the data. With dynamic sampling, groups whose answers
        are all right or all wrong are left out and more is asked, at most `most_batches` times.

        Raises ValueError when nothing at all is left to learn from.
        """
        config, batch = self.config, Batch(groups=[], position=position)
        for _ in range(config.most_batches if config.dynamic_sampling else 1):
            groups = self._ask(policy, batch)
            if config.dynamic_sampling:
                groups = [group for group in groups if _teaches(group)]
            batch.groups += groups
            if len(batch.groups) >= config.prompts:
                break
        batch.groups = batch.groups[: config.prompts]
        if not batch.groups:
            raise ValueError(
                f"of {batch.asked} questions from number {position} on all answers were equally "
                "right: there is nothing to learn from"
            )
        return batch

    def answered(
        self, policy: Policy, questions: Sequence[Question], seeds: np.ndarray, batch: Batch
    ) -> list[Group]:
        """Groups for some questions; faults and times go to the batch."""
        prompts = [self.prompt(question) for question in questions]
        rollouts = self._drawn(policy, prompts, seeds, batch)
        started, samples = time.perf_counter(), seeds.shape[1]
        tokenizer = self.loaded.tokenizer
        assert tokenizer is not None
        answers = [
            answer_of(rollout, prompts[number // samples], tokenizer)
            for number, rollout in enumerate(rollouts)
        ]
        asked = [(questions[number // samples], answer) for number, answer in enumerate(answers)]
        grades = self.grader.grade(asked)
        batch.faults += grades.faults
        batch.examples = grades.examples | batch.examples
        batch.seconds["reward"] += time.perf_counter() - started
        rewards = np.array(grades.rewards).reshape(len(questions), samples)
        parts = zip(questions, _by(samples, rollouts), _by(samples, answers), rewards, strict=True)
        return [self._group(*part) for part in parts]

    def prompt(self, question: Question) -> Prompt:
        """A question's ids."""
        template, tokenizer = self.loaded.template, self.loaded.tokenizer
        assert template is not None and tokenizer is not None
        form = ChatFormat(template=template, tokenizer=tokenizer)
        return form.prompt(Chat(messages=question.messages))

    def request(self, prompts: Sequence[Prompt], seeds: np.ndarray) -> RolloutRequest:
        """What the rollout is asked for."""
        tokenizer = self.loaded.tokenizer
        assert tokenizer is not None
        return RolloutRequest(
            prompts=[prompt.ids for prompt in prompts],
            seeds=seeds,
            max_tokens=self.config.max_tokens,
            temperature=self.config.temperature,
            stop_ids=tuple(tokenizer.stop_ids),
            record=self.config.replay,
            record_cache=self.config.replay_cache,
        )

    def _ask(self, policy: Policy, batch: Batch) -> list[Group]:
        """Asks one batch's worth of questions; one that leaves no room for an answer is passed
        over and counted.
        """
        config, numbers, questions = self.config, [], []
        room = self.loaded.config.max_context - config.max_tokens
        while len(questions) < config.prompts:
            question = self.questions.at(batch.position)
            if len(self.prompt(question).ids) <= room:
                numbers.append(batch.position)
                questions.append(question)
            else:
                batch.faults["too_long"] += 1
                self._check_some_fit(batch, room)
            batch.position += 1
        batch.asked += len(questions)
        seeds = sample_seeds(config.seed, numbers, config.samples)
        return self.answered(policy, questions, seeds, batch)

    def _check_some_fit(self, batch: Batch, room: int) -> None:
        if batch.faults["too_long"] > 100 * self.config.prompts:
            raise ValueError(
                f"{batch.faults['too_long']} questions were longer than the {room} tokens that "
                f"max_tokens={self.config.max_tokens} leaves of the context"
            )

    def _drawn(
        self, policy: Policy, prompts: Sequence[Prompt], seeds: np.ndarray, batch: Batch
    ) -> list[Rollout]:
        started = time.perf_counter()
        request = self.request(prompts, seeds)
        rollouts = self.rollout(policy, request)
        check_rollouts(rollouts, request, policy.version, self.loaded.config)
        batch.seconds["gen"] += time.perf_counter() - started
        return rollouts

    def _group(
        self,
        question: Question,
        rollouts: list[Rollout],
        answers: list[Answer],
        rewards: np.ndarray,
    ) -> Group:
        c = self.config
        shaping = Shaping(
            plus_minus_one=c.plus_minus_one,
            format_score=c.format_score,
            overlong_tokens=c.overlong_tokens,
            overlong_penalty=c.overlong_penalty,
            max_tokens=c.max_tokens,
        )
        scores = [shaping.score(*pair) for pair in zip(rewards.tolist(), answers, strict=True)]
        return Group(
            question=question,
            rollouts=rollouts,
            answers=answers,
            rewards=rewards,
            scores=np.array(scores),
        )


def sample_seeds(seed: int, numbers: Iterable[int], samples: int) -> np.ndarray:
    """Seeds [P, G] that depend on the run's, the question's number and the sample's alone."""
    return np.array([[_seed(seed, number, g) for g in range(samples)] for number in numbers])


def _seed(*parts: int) -> int:
    digest = hashlib.blake2b(np.array(parts, np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 2**63


def _teaches(group: Group) -> bool:
    """Whether accuracies differ: shaped scores always do."""
    return bool(has_spread(group.accuracy[None], group.valid[None])[0])


def _by(samples: int, items: list) -> list[list]:
    return [items[first : first + samples] for first in range(0, len(items), samples)]
