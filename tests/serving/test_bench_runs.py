"""Whole runs over gRPC: workloads of agents and of shared prefixes, and their hit rates."""

from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from serving.bench.answers import Answer
from serving.bench.asks import Ask
from serving.bench.client import AskError
from serving.bench.grpc_client import GrpcClient
from serving.bench.options import Agentic, Bench, Dataset, Numbers, Sampling, Target, Traffic
from serving.bench.prefix_hits import num_shared
from serving.bench.results import Run, results
from serving.bench.run import Setting, metrics_urls
from serving.bench.run import run as run_bench
from serving.bench.workload import Texts
from serving.engine_api import Output
from serving.scheduling.request import Asked
from tests.serving.servers import INFO, PATIENCE_S, FakeEngine, connected, run, soon

LONG = replace(INFO, max_model_len=2048)


class Caching(FakeEngine):
    """Has a prefix cache without end: finds whole blocks that a prompt before had, by comparing."""

    def __init__(self, **options) -> None:
        super().__init__(info=LONG, **options)
        self._prompts: list[array] = []
        self._found: dict[str, int] = {}

    def submit(self, asked: Asked) -> AsyncIterator[Output]:
        outputs, prompt = super().submit(asked), array("i", asked.prompt)
        most = max((num_shared(prompt, other) for other in self._prompts), default=0)
        block = self.info.block_size
        self._found[asked.request_id] = min(most, len(prompt) - 1) // block * block
        self._prompts.append(prompt)
        return outputs

    def _output(self, asked: Asked, *rest) -> Output:
        found = self._found[asked.request_id]
        return super()._output(asked, *rest)._replace(cached_tokens=found)


def bench(**parts) -> Bench:
    return Bench(report=replace(Bench().report, disable_tqdm=True), **parts)


def whole_run(engine: FakeEngine, wanted: Bench) -> tuple[dict, Run, str]:
    """The result, the run, and what was printed, of a bench over a server of the engine."""

    async def test():
        async with connected(engine) as server:
            client = GrpcClient(replace(wanted.target, port=server.port), wanted.sampling)
            console, facts = Console(file=StringIO(), width=200), await client.facts()
            setting = Setting(client=client, facts=facts, texts=Texts(), console=console)
            done = await run_bench(wanted, setting)
            await client.close()
            await soon(lambda: not engine.held, PATIENCE_S)
            return results(wanted, done), done, console.file.getvalue()

    return run(test)


AGENTS = Agentic(agentic_sessions=5, agentic_turns=Numbers((3, 12)), agentic_think_scale=0.001)


def test_agents_measure_the_hit_rate_that_was_printed_first():
    engine = Caching()
    wanted = bench(
        dataset=Dataset(dataset_name="agentic"),
        traffic=Traffic(max_concurrency=3),
        agentic=AGENTS,
    )
    result, done, said = whole_run(engine, wanted)
    rate = result["theoretical_prefix_hit_rate"]
    assert f"{rate:.2%} in blocks of 16" in said.partition("\n")[0]
    assert result["prefix_hit_rate"] == pytest.approx(rate, abs=1e-12)
    assert result["failed"] == 0 < result["completed"] == len(done.hits[16])
    assert 0.5 < result["theoretical_prefix_hit_rate_block_64"] < rate < 1


def test_agents_are_answered_at_full_length_and_warm_ups_are_not_measured():
    engine = Caching()
    wanted = bench(dataset=Dataset(dataset_name="agentic"), agentic=AGENTS)
    result, done, _ = whole_run(engine, wanted)
    assert all(asked.sampling.ignore_eos for asked in engine.asked)
    lengths = {asked.request_id: asked.sampling.max_tokens for asked in engine.asked}
    assert {one.request_id: one.output_tokens for one in done.answers}.items() <= lengths.items()
    warm_ups = lengths.keys() - {one.request_id for one in done.answers}
    assert [lengths[name] for name in warm_ups] == [1]
    assert result["num_prompts"] == len(engine.asked) - 1


def test_one_lane_has_one_request_at_a_time_but_for_sub_agents():
    engine = Caching(step_s=0.001)
    sessions = replace(AGENTS, agentic_sessions=3)
    whole_run(engine, bench(dataset=Dataset(dataset_name="agentic"), agentic=sessions))
    names = [asked.request_id for asked in engine.asked]
    main = [name for name in names if "c-" not in name]
    order = [tuple(map(int, name.split("-")[2:])) for name in main]
    assert order == sorted(order)


def test_a_failed_turn_does_not_end_a_session():
    class Flaky(GrpcClient):
        sent = 0

        async def ask(self, ask: Ask, answer: Answer) -> None:
            self.sent += 1
            if self.sent % 3 == 0:
                raise AskError("bad luck")
            await super().ask(ask, answer)

    async def test():
        async with connected(Caching()) as server:
            client = Flaky(Target(port=server.port), Sampling())
            facts = await client.facts()
            setting = Setting(
                client=client, facts=facts, texts=Texts(), console=Console(quiet=True)
            )
            wanted = bench(dataset=Dataset(dataset_name="agentic"), agentic=AGENTS)
            result = results(wanted, done := await run_bench(wanted, setting))
            await client.close()
            return result, len(done.hits[16])

    result, planned = run(test)
    assert result["completed"] + result["failed"] == planned
    assert result["failure_reasons"] == {"bad luck": result["failed"]}
    assert result["theoretical_prefix_hit_rate"] is not None


def test_a_shared_random_prefix_is_found_by_all_but_the_first():
    wanted = bench(
        dataset=Dataset(random_input_len=20, random_prefix_len=64, random_output_len=2),
        traffic=Traffic(num_prompts=10, max_concurrency=1, num_warmups=2),
    )
    engine = Caching()
    result, _, said = whole_run(engine, wanted)
    assert len(engine.asked) == 12
    assert result["num_prompts"] == 10
    assert "theoretical prefix hit rate of 10 requests" in said
    assert result["theoretical_prefix_hit_rate"] == pytest.approx(9 * 64 / (10 * 84))
    assert result["prefix_hit_rate"] == result["theoretical_prefix_hit_rate"]


def test_sampling_and_lengths_reach_the_server():
    engine = FakeEngine(info=LONG)
    wanted = bench(
        sampling=Sampling(temperature=0.0, top_p=0.9, top_k=5, min_p=0.1, ignore_eos=True),
        dataset=Dataset(random_input_len=40, random_output_len=10, random_range_ratio=0.5),
        traffic=Traffic(num_prompts=30),
    )
    whole_run(engine, wanted)
    sampling = engine.asked[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.9, 5)
    assert (sampling.min_p, sampling.ignore_eos) == (0.1, True)
    prompts = {len(asked.prompt) for asked in engine.asked}
    answers = {asked.sampling.max_tokens for asked in engine.asked}
    assert prompts <= set(range(20, 61)) and max(prompts) - min(prompts) > 20
    assert answers <= set(range(5, 16)) and max(answers) - min(answers) > 5


@pytest.mark.parametrize(
    ("target", "urls"),
    [
        (Target(), ["http://127.0.0.1:8001/metrics"]),
        (Target(base_url="gpu7:50051"), ["http://gpu7:8001/metrics"]),
        (Target(metrics_url="http://a/b"), ["http://a/b"]),
        (
            Target(backend="openai", base_url="http://gpu7:8000"),
            ["http://gpu7:8000/metrics", "http://gpu7:8001/metrics"],
        ),
    ],
)
def test_the_metrics_page_is_sought_where_vllm_and_we_have_it(target, urls):
    assert metrics_urls(target) == urls
