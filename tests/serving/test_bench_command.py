"""The command `minimax-serve bench`: flags, tables, files and pictures."""

import asyncio
import json
import math
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from serving.bench.command import main
from serving.bench.options import Dataset, Numbers, Report, Traffic
from serving.bench.pictures import frontier
from tests.serving.servers import INFO, FakeEngine, connected

# What `vllm bench serve` writes (specification serving 4.4), with two of the percentiles.
VLLM_KEYS = {
    *("date", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens"),
    *("total_output_tokens", "request_throughput", "request_goodput", "output_throughput"),
    *("total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests"),
    *(f"{part}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el")
      for part in ("mean", "median", "std", "p90", "p99")),
}  # fmt: skip


@contextmanager
def served(engine: FakeEngine) -> Iterator[int]:
    """The port of a server over an engine, in a thread of its own."""
    loop, port = asyncio.new_event_loop(), []
    ready, ended = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with connected(engine) as server:
            port.append(server.port)
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    try:
        yield port[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)
        loop.close()


def engine(**options) -> FakeEngine:
    return FakeEngine(info=replace(INFO, max_model_len=2048), **options)


def bench(port: int, *flags: str) -> int:
    """The exit code of the command; small random prompts unless the flags say otherwise."""
    small = ["--num-prompts", "8", "--random-input-len", "20", "--random-output-len", "6"]
    given = [*flags] if "--dataset-name" in flags or "--sweep" in flags else [*small, *flags]
    with pytest.raises(SystemExit) as ended:
        main(["--port", str(port), "--disable-tqdm", *given])
    return int(ended.value.code or 0)


def test_a_run_writes_the_keys_of_vllm_a_table_and_a_picture(tmp_path, capsys):
    flags = ["--save-result", "--result-dir", str(tmp_path), "--max-concurrency", "2"]
    picture = tmp_path / "run.png"
    with served(engine(step_s=0.001)) as port:
        code = bench(port, *flags, "--plot", str(picture), "--goodput", "ttft:9000", "tpot:9000")
    (file,) = tmp_path.glob("*.json")
    result, said = json.loads(file.read_text()), capsys.readouterr().out
    assert code == 0
    assert result.keys() >= VLLM_KEYS
    assert "ttfts" not in result
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (8, 0, 48)
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert file.name.startswith("grpc-infqps-concurrency2-m3.1-flash-")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "theoretical prefix hit rate" in said.splitlines()[0]
    assert "TTFT" in said and "SYNTHETIC" not in said


def test_details_are_saved_when_asked_for(tmp_path):
    flags = ["--save-result", "--save-detailed", "--result-dir", str(tmp_path)]
    with served(engine()) as port:
        bench(port, *flags, "--result-filename", "r.json")
    result = json.loads((tmp_path / "r.json").read_text())
    assert len(result["ttfts"]) == len(result["itls"]) == 8
    assert result["output_lens"] == [6] * 8


def test_a_synthetic_projection_says_so_in_the_table_the_file_and_the_pictures(
    tmp_path, capsys, monkeypatch
):
    titles = titles_of_pictures(monkeypatch)
    saved = ["--save-result", "--result-dir", str(tmp_path), "--result-filename"]
    synthetic = ["--synthetic-acceptance", "3.2", "--price", "6"]
    with served(engine(step_s=0.001)) as port:
        bench(port, *saved, "one.json", *synthetic, "--plot", str(tmp_path / "one.png"))
        said = capsys.readouterr().out
        bench(port, *saved, "many.json", *synthetic, "--sweep", "1,2", "--num-prompts", "3",
              "--random-input-len", "9", "--random-output-len", "5",
              "--plot", str(tmp_path / "many.png"))  # fmt: skip
    assert "SYNTHETIC $ per M output tokens" in said
    assert "SYNTHETIC: projected to 3.2 tokens a verification step" in said
    assert "SYNTHETIC" in capsys.readouterr().out
    assert all("SYNTHETIC" in title for title in titles) and len(titles) == 2
    one = json.loads((tmp_path / "one.json").read_text())
    assert one["synthetic_note"].startswith("SYNTHETIC")
    assert one["synthetic_cost_per_million_output_tokens"] > 0
    for result in json.loads((tmp_path / "many.json").read_text())["results"]:
        assert result["synthetic_note"].startswith("SYNTHETIC")


def titles_of_pictures(monkeypatch) -> list[str]:
    """Filled with the first title of each picture that is saved."""
    from matplotlib.figure import Figure

    titles: list[str] = []
    save = Figure.savefig

    def saved(figure, *args, **options):
        titles.append(figure.axes[0].get_title())
        return save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", saved)
    return titles


def test_a_sweep_has_a_run_a_concurrency_with_prompts_of_its_own_and_a_frontier(tmp_path, capsys):
    picture, answers = tmp_path / "frontier.png", engine(step_s=0.001)
    flags = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "s.json"]
    with served(answers) as port:
        code = bench(port, "--sweep", "1,2,4", "--random-input-len", "30", "--num-gpus", "2",
                     "--random-output-len", "4", *flags, "--plot", str(picture))  # fmt: skip
    sweep = json.loads((tmp_path / "s.json").read_text())
    assert code == 0
    assert [one["max_concurrency"] for one in sweep["results"]] == [1, 2, 4]
    assert [one["completed"] for one in sweep["results"]] == [10, 20, 40]
    prompts = [tuple(asked.prompt) for asked in answers.asked]
    assert len(set(prompts)) == 70
    assert answers.flushed == 3
    for one in sweep["results"]:
        per_gpu = one["output_throughput"] / 2
        assert one["output_throughput_per_gpu"] == pytest.approx(per_gpu)
    best = sweep["frontier"]
    assert {point["max_concurrency"] for point in best} <= {1, 2, 4}
    speeds = [point["tokens_per_s_per_user"] for point in best]
    assert speeds == sorted(speeds, reverse=True)
    assert picture.stat().st_size > 1000
    assert "tok/s" in capsys.readouterr().out


def test_the_frontier_is_what_nothing_beats_both_ways():
    points = [(100.0, 10.0, 1), (90.0, 30.0, 2), (80.0, 20.0, 4), (50.0, 60.0, 8), (40.0, 60.0, 16)]
    assert frontier(points) == [points[0], points[1], points[3]]
    assert frontier([]) == []


def test_a_run_in_which_every_request_fails_ends_with_1_and_the_reasons(tmp_path, capsys):
    fault = engine()
    fault.fault = "out of luck"
    with served(fault) as port:
        code = bench(port, "--plot", str(tmp_path / "none.png"), "--synthetic-acceptance", "3")
    said = capsys.readouterr().out
    assert code == 1
    assert "8 failed: INTERNAL: out of luck" in said
    assert not list(tmp_path.iterdir())


def test_an_interrupt_ends_a_run_early_with_a_report(capsys):
    slow = engine(step_s=0.05)
    timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
    with served(slow) as port:
        timer.start()
        code = bench(port, "--random-output-len", "500", "--max-concurrency", "2")
        timer.join()
    assert code == 1
    assert "0, 0, 2" in capsys.readouterr().out
    assert not slow.held


def test_agents_run_from_the_command(tmp_path, capsys):
    flags = ["--dataset-name", "agentic", "--agentic-think-scale", "0", "--agentic-turns", "2,4"]
    saved = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "a.json"]
    with served(engine()) as port:
        code = bench(port, *flags, *saved, "--tokenizer", "tiny", "--max-concurrency", "2")
    result = json.loads((tmp_path / "a.json").read_text())
    assert (code, result["failed"], result["cancelled"]) == (0, 0, 0)
    assert "blocks of 64" in capsys.readouterr().out
    assert result["theoretical_prefix_hit_rate_block_64"] > 0


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--backend http", "backend='http' is not one of grpc, openai, openai-chat, vllm"),
        ("--request-rate 0", "request_rate=0.0 is not positive"),
        ("--burstiness nan", "burstiness=nan is not positive"),
        ("--max-concurrency 0", "max_concurrency=0 is not positive"),
        ("--ramp-up-strategy linear", "ramp_up_strategy=linear, ramp_up_start_rps=None"),
        ("--goodput itl:5", "'itl:5' is not of ttft, tpot or e2el"),
        ("--metric-percentiles 50,101", "metric_percentiles=50,101 are not in 0..100"),
        ("--metric-percentiles p99", "'p99' is not a list of numbers such as 1,2,4"),
        ("--percentile-metrics ttft,speed", "percentile_metrics=['speed'] are not among"),
        ("--dataset-name custom", "dataset_name=custom and dataset_path=None do not go together"),
        ("--dataset-path x.json", "dataset_name=random and dataset_path=x.json do not go together"),
        ("--dataset-name agentic --request-rate 2", "give no request_rate"),
        ("--dataset-name agentic --num-prompts 2", "no num_prompts"),
        ("--sweep 1,2.5", "sweep=1,2.5 are not numbers of concurrent requests"),
        ("--sweep 1,2 --max-concurrency 3", "sweep gives each run its max_concurrency"),
        ("--sweep 1,2 --request-rate 3", "give no request_rate"),
        ("--synthetic-acceptance 0.5", "synthetic_acceptance=0.5 is less than 1 token"),
        ("--price 0", "price=0.0 is not positive"),
        ("--result-dir /no/such", "result_dir='/no/such' is no folder"),
        ("--plot /no/such/a.png", "plot='/no/such/a.png' is in no folder that exists"),
        ("--tokenizer nowhere", "'nowhere' is neither a bundled model (tiny)"),
        ("--ssl-ca-certs /no/such", "ssl_ca_certs='/no/such' cannot be read"),
        ("--agentic-start 0.5,1", "agentic_start=(0.5, 1.0) is no range in [0, 1)"),
    ],
)
def test_bad_flags_are_one_sentence_and_code_2(flags, complaint, capsys):
    with pytest.raises(SystemExit) as ended:
        main(flags.split())
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n")) == (2, 1)
    assert complaint in error


def test_an_unknown_flag_is_an_error(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--request-rates", "3"])
    assert ended.value.code == 2
    assert "--request-rates" in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_one_sentence(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--port", "1", "--ready-check-timeout-sec", "0"])
    assert ended.value.code == 2
    assert "the server does not answer" in capsys.readouterr().err


def test_defaults_are_vllms():
    traffic, dataset, report = Traffic(), Dataset(), Report()
    assert (traffic.request_rate, traffic.burstiness, traffic.seed) == (math.inf, 1.0, 0)
    assert (dataset.random_input_len, dataset.random_output_len) == (1024, 128)
    assert report.metric_percentiles == Numbers((50, 90, 99))
