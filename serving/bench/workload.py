"""What one run sends: made whole before the first request, so that what a prefix cache could find
of it is known beforehand.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import randbits

import numpy as np

from minimax_jax.chat import Chat, ChatFormat, ChatTemplate, Tokenizer
from minimax_jax.loaded import find
from serving.bench.agents import Play, hits_of_plays, plan, play_all
from serving.bench.arrivals import Ramp, arrivals
from serving.bench.asks import Ask, Segment, concatenated
from serving.bench.client import Facts
from serving.bench.load import Load, send_at
from serving.bench.options import Bench, Traffic
from serving.bench.prefix_hits import Hits, hits_of_asks
from serving.bench.prompt_files import PromptFile
from serving.bench.random_prompts import prefix_repetition_asks, random_asks
from serving.bench.sessions import Planner, Shape, num_requests
from serving.bench.words import Words

CHAT = "openai-chat"  # the backend that gets messages, not a prompt
NUM_PROMPTS = 1000  # vLLM's default
SESSIONS_A_LANE = 2
CORPUS_BLOCK = 64  # tokens of a block in the corpus that the agentic workload rebuilds
DEFAULT_BLOCK = 128  # the model's own
TOKENIZER_FILES = ("tokenizer*", "*.jinja", "config.json", "generation_config.json")
WARM_UP_SEED = 1 << 20  # so far from a run's seed that their prompts differ


@dataclass(frozen=True, kw_only=True)
class Texts:
    """A tokenizer and a template, where there are."""

    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None

    @classmethod
    def load(cls, name: str | None) -> "Texts":
        """From a folder, a bundled name or a hub name. Raises ValueError with a sentence."""
        if name is None:
            return cls()
        folder: Path = find(name, files=TOKENIZER_FILES)
        template = ChatTemplate.load(folder) if ChatTemplate.is_in(folder) else None
        return cls(tokenizer=Tokenizer.load(folder), template=template)

    @property
    def format(self) -> ChatFormat | None:
        """How chats become ids, where both are there."""
        if self.tokenizer is None or self.template is None:
            return None
        return ChatFormat(template=self.template, tokenizer=self.tokenizer)

    def ids_of_chat(self, segments: Sequence[Segment]) -> array | None:
        """The ids that a chat of these segments becomes; None without a template."""
        if self.format is None:
            return None
        messages = [{"role": one.role, "content": one.text} for one in segments]
        return array("i", self.format.prompt(Chat(messages=messages)).ids)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests and when they are sent, or plays of sessions, and their theoretical hits by size of
    blocks, the server's first.
    """

    asks: Sequence[Ask] = ()
    warm_ups: Sequence[Ask] = ()
    times: Sequence[float] = ()
    plays: Sequence[Play] = ()
    lanes: int = 1
    hits: Mapping[int, Mapping[str, Hits]] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        """How many are measured."""
        return len(self.asks) or sum(num_requests(play.session, play.start) for play in self.plays)

    def rates(self) -> dict[int, float | None]:
        """The theoretical hit rate of all of it, by size of blocks."""
        return {size: sum(hits.values(), Hits()).rate for size, hits in self.hits.items()}

    async def warm_up(self, load: Load) -> None:
        """Sends the requests that come before, one after the other."""
        for ask in self.warm_ups:
            await load.send(ask)

    async def send(self, load: Load) -> None:
        """Sends all of it."""
        if self.plays:
            await play_all(load, self.plays, self.lanes)
        else:
            await send_at(load, self.asks, self.times)


def make_workload(bench: Bench, facts: Facts, texts: Texts) -> Workload:
    """The workload that is asked for. Raises ValueError for what the server has no room for."""
    own = bench.target.block_size or facts.block_size or DEFAULT_BLOCK
    sizes = dict.fromkeys((own, CORPUS_BLOCK))
    ids_of = texts.ids_of_chat if bench.target.backend == CHAT else concatenated
    if bench.is_agentic:
        plays, lanes = _plays(bench, facts, texts), bench.traffic.max_concurrency or 1
        hits = {size: hits_of_plays(plays, size, ids_of) for size in sizes}
        return Workload(plays=plays, lanes=lanes, hits=hits)
    traffic = bench.traffic
    count, seed = traffic.num_prompts or NUM_PROMPTS, traffic.seed
    asks = _asks(bench, facts, texts, count, seed)
    warm_ups = [
        replace(ask, is_measured=False)
        for ask in _asks(bench, facts, texts, traffic.num_warmups, seed + WARM_UP_SEED)
    ]
    random = np.random.default_rng(seed)
    return Workload(
        asks=asks,
        warm_ups=warm_ups,
        times=arrivals(count, _rate(traffic), traffic.burstiness, random).tolist(),
        hits={own: hits_of_asks([*warm_ups, *asks], own, ids_of)},
    )


def _asks(bench: Bench, facts: Facts, texts: Texts, count: int, seed: int) -> list[Ask]:
    dataset = bench.dataset
    if dataset.dataset_path is None:
        name = dataset.dataset_name
        make = prefix_repetition_asks if name == "prefix_repetition" else random_asks
        return make(dataset, Words(facts, texts.tokenizer), count, seed)
    template = None if bench.target.backend == CHAT else texts.format
    file = PromptFile(dataset, tokenizer=texts.tokenizer, template=template)
    return file.asks(count, seed)


def _plays(bench: Bench, facts: Facts, texts: Texts) -> list[Play]:
    agentic, lanes = bench.agentic, bench.traffic.max_concurrency or 1
    window = agentic.agentic_window or facts.max_model_len
    if window is None:
        raise ValueError("the server does not say how long a context is: give --agentic-window")
    shape = Shape.scaled(agentic, window)
    planner = Planner(shape, Words(facts, texts.tokenizer), bench.traffic.seed, randbits(32))
    return plan(
        planner,
        num_sessions=agentic.agentic_sessions or SESSIONS_A_LANE * lanes,
        lanes=lanes,
        start=(agentic.agentic_start.values[0], agentic.agentic_start.values[1]),
        seed=bench.traffic.seed,
    )


def _rate(traffic: Traffic) -> float | Ramp:
    if traffic.ramp_up_strategy is None:
        return traffic.request_rate
    assert traffic.ramp_up_start_rps is not None and traffic.ramp_up_end_rps is not None
    return Ramp(
        strategy=traffic.ramp_up_strategy,
        start=traffic.ramp_up_start_rps,
        end=traffic.ramp_up_end_rps,
    )
