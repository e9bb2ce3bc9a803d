"""The flags of the load generator, named as `vllm bench serve` names them where it has them."""

import math
from dataclasses import dataclass
from typing import Literal

from configs.cli import described
from configs.parts import check, check_positive

METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True)
class Numbers:
    """Numbers written with commas between them."""

    values: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> "Numbers":
        """Reads `1,2,4`. Raises ValueError with a sentence."""
        try:
            values = tuple(float(part) for part in text.split(","))
        except ValueError as error:
            raise ValueError(f"{text!r} is not a list of numbers such as 1,2,4") from error
        check(all(map(math.isfinite, values)), f"{text!r} holds a number that is not finite")
        return cls(values)

    def __str__(self) -> str:
        return ",".join(f"{value:g}" for value in self.values)


@dataclass(frozen=True, kw_only=True)
class Target:
    """Which server is asked, and how it is reached."""

    backend: Literal["grpc", "openai", "openai-chat", "vllm"] = described(
        "grpc", "grpc, openai (or vllm: /v1/completions) or openai-chat"
    )
    base_url: str | None = described(None, "of HTTP, or host:port of gRPC; else --host and --port")
    host: str = described("127.0.0.1", "the server's host")
    port: int | None = described(None, "the server's port: 50051 for gRPC, else 8000")
    endpoint: str | None = described(None, "the path of HTTP, if not the usual one")
    model: str | None = described(
        None, "the served name; by default what the server names", "--served-model-name"
    )
    tokenizer: str | None = described(None, "a folder, bundled or hub name; gRPC can do without")
    block_size: int | None = described(None, "tokens of a block; gRPC servers say it")
    api_key: str | None = described(None, "the bearer token")
    ssl_ca_certs: str | None = described(None, "speaks TLS, with certificates of these, PEM")
    metrics_url: str | None = described(None, "the Prometheus page; by default vLLM's or ours")
    request_timeout: float = described(21_600.0, "seconds after which a request has failed")
    ready_check_timeout_sec: float = described(60.0, "seconds to wait for the server")

    def __post_init__(self) -> None:
        check(self.request_timeout > 0, f"request_timeout={self.request_timeout} is not positive")
        check(self.block_size is None or self.block_size > 0, f"block_size={self.block_size} < 1")


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """How many requests, and when."""

    num_prompts: int | None = described(None, "requests: 1000, in a sweep ten a concurrent one")
    max_concurrency: int | None = described(None, "requests at a time; agents: session trees")
    request_rate: float = described(math.inf, "requests a second; inf sends them at once")
    burstiness: float = described(1.0, "shape of the gamma of arrivals; 1 is Poisson, less bursts")
    ramp_up_strategy: Literal["linear", "exponential"] | None = described(None, "of the rate")
    ramp_up_start_rps: float | None = described(None, "requests a second at the first request")
    ramp_up_end_rps: float | None = described(None, "requests a second at the last one")
    num_warmups: int = described(0, "requests before the measured ones")
    duration: float | None = described(None, "seconds after which what still runs is cancelled")
    seed: int = described(0, "of lengths, tokens and arrivals")

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_concurrency", "duration"):
            value = getattr(self, name)
            check(value is None or value > 0, f"{name}={value} is not positive")
        for name in ("request_rate", "burstiness"):
            check(getattr(self, name) > 0, f"{name}={getattr(self, name)} is not positive")
        check(self.num_warmups >= 0, f"num_warmups={self.num_warmups} is negative")
        ends = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        has_ramp = self.ramp_up_strategy is not None
        check(
            has_ramp == (None not in ends) and has_ramp == (ends != (None, None)),
            f"ramp_up_strategy={self.ramp_up_strategy}, ramp_up_start_rps={ends[0]} and "
            f"ramp_up_end_rps={ends[1]} go together",
        )
        if has_ramp:
            check(math.isinf(self.request_rate), "a ramp names the rates, so request_rate cannot")
            check(min(e or 0 for e in ends) > 0, f"a ramp of {ends} is not from and to a rate")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What every request asks; unset, the server's own default."""

    temperature: float | None = described(None, "0 is greedy; unset, the server's default")
    top_p: float | None = described(None, "share of the likelihood that is sampled from")
    top_k: int | None = described(None, "likeliest tokens that are sampled from")
    min_p: float | None = described(None, "least likelihood, as a share of the likeliest's")
    ignore_eos: bool = described(False, "goes on to the asked length; agentic always does")


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """What is asked."""

    dataset_name: Literal["random", "prefix_repetition", "sharegpt", "custom", "agentic"] = (
        described("random", "random, prefix_repetition, sharegpt, custom or agentic")
    )
    dataset_path: str | None = described(None, "a ShareGPT JSON, or JSON lines with `prompt`")
    random_input_len: int = described(1024, "tokens of a random prompt", "--input-len")
    random_output_len: int = described(128, "tokens of its answer", "--output-len")
    random_range_ratio: float = described(0.0, "lengths vary by this share, both ways")
    random_prefix_len: int = described(0, "tokens before these that all prompts share")
    prefix_repetition_prefix_len: int = described(256, "tokens of a shared prefix")
    prefix_repetition_suffix_len: int = described(256, "tokens after it")
    prefix_repetition_num_prefixes: int = described(10, "prefixes, in turn")
    prefix_repetition_output_len: int = described(128, "tokens of an answer")
    sharegpt_output_len: int | None = described(None, "in place of the recorded answer's length")
    custom_output_len: int = described(256, "of a line without `output_tokens`")
    skip_chat_template: bool = described(False, "sends a prompt as it is, not as a chat")
    disable_shuffle: bool = described(False, "keeps the order of the file")

    def __post_init__(self) -> None:
        check_positive(self, "random_input_len", "random_output_len", "custom_output_len")
        check_positive(self, "prefix_repetition_num_prefixes", "prefix_repetition_output_len")
        for name in ("random_prefix_len", "prefix_repetition_prefix_len"):
            check(getattr(self, name) >= 0, f"{name}={getattr(self, name)} is negative")
        check_positive(self, "prefix_repetition_suffix_len")
        ratio = self.random_range_ratio
        check(0 <= ratio < 1, f"random_range_ratio={ratio} is not in [0, 1)")
        needs_file = self.dataset_name in ("sharegpt", "custom")
        check(
            needs_file == (self.dataset_path is not None),
            f"dataset_name={self.dataset_name} and dataset_path={self.dataset_path} do not go "
            "together",
        )


@dataclass(frozen=True, kw_only=True)
class Agentic:
    """The sessions of the agentic workload (`sessions.py`)."""

    agentic_sessions: int | None = described(None, "sessions in all; 2 for each concurrent one")
    agentic_scale: float | None = described(
        None, "of all token counts; by default 1 for a window of 131072 tokens, less for a shorter"
    )
    agentic_window: int | None = described(None, "tokens at most; by default the server's")
    agentic_turns: Numbers = described(Numbers((20, 100)), "least and most turns of a session")
    agentic_start: Numbers = described(Numbers((0.25, 0.75)), "where a lane's first session begins")
    agentic_think_scale: float = described(1.0, "of the think times between turns; 0 for none")

    def __post_init__(self) -> None:
        scale = self.agentic_scale
        check(scale is None or scale > 0, f"agentic_scale={scale} is not positive")
        sessions = self.agentic_sessions
        check(sessions is None or sessions > 0, f"agentic_sessions={sessions} is not positive")
        window, think = self.agentic_window, self.agentic_think_scale
        check(window is None or window > 0, f"agentic_window={window} is not positive")
        check(0 <= think < math.inf, f"agentic_think_scale={think} is not a factor")
        turns, start = self.agentic_turns.values, self.agentic_start.values
        check(len(turns) == 2 and 1 <= turns[0] <= turns[1], f"agentic_turns={turns} is no range")
        good = len(start) == 2 and 0 <= start[0] <= start[1] < 1
        check(good, f"agentic_start={start} is no range in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What is said of it, and where."""

    percentile_metrics: str = described(",".join(METRICS), "the latencies that are reported")
    metric_percentiles: Numbers = described(Numbers((50, 90, 99)), "percentiles of each")
    save_result: bool = described(False, "writes the JSON")
    save_detailed: bool = described(False, "with every request's own figures")
    result_dir: str = described(".", "its folder")
    result_filename: str | None = described(None, "its name; by default of the run's figures")
    label: str | None = described(None, "the run's name in it; by default the backend")
    plot: str | None = described(None, "a picture: latencies over time, of a sweep the frontier")
    sweep: Numbers | None = described(None, "concurrencies such as 1,2,4,8, one run each")
    num_gpus: int = described(1, "of the server, for figures a GPU")
    price: float | None = described(None, "dollars a GPU hour, for dollars a million tokens")
    synthetic_acceptance: float | None = described(
        None, "also projects the figures to so many tokens a verification step"
    )
    disable_tqdm: bool = described(False, "shows no progress bar")

    def __post_init__(self) -> None:
        others = sorted(set(self.metrics) - set(METRICS))
        check(not others, f"percentile_metrics={others} are not among {', '.join(METRICS)}")
        good = all(0 <= value <= 100 for value in self.metric_percentiles.values)
        check(good, f"metric_percentiles={self.metric_percentiles} are not in 0..100")
        check_positive(self, "num_gpus")
        check(self.price is None or self.price > 0, f"price={self.price} is not positive")
        length = self.synthetic_acceptance
        check(length is None or length >= 1, f"synthetic_acceptance={length} is less than 1 token")
        levels = () if self.sweep is None else self.sweep.values
        whole = all(level >= 1 and level == int(level) for level in levels)
        check(whole, f"sweep={self.sweep} are not numbers of concurrent requests")

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the latencies to report."""
        return tuple(self.percentile_metrics.split(","))


@dataclass(frozen=True, kw_only=True)
class Objectives:
    """Milliseconds that a request's latencies may reach and still be good."""

    limits: tuple[tuple[str, float], ...] = ()

    @classmethod
    def parse(cls, texts: list[str]) -> "Objectives":
        """Reads `ttft:500 tpot:50`. Raises ValueError with a sentence."""
        limits = []
        for text in texts:
            name, _, value = text.partition(":")
            check(name in ("ttft", "tpot", "e2el"), f"{text!r} is not of ttft, tpot or e2el")
            limits += [(name, _milliseconds(value, text))]
        return cls(limits=tuple(limits))


def _milliseconds(value: str, text: str) -> float:
    try:
        limit = float(value)
    except ValueError as error:
        raise ValueError(f"{text!r} is not of the form ttft:500, in ms") from error
    check(limit > 0, f"{text!r} is not a positive number of ms")
    return limit


@dataclass(frozen=True, kw_only=True)
class Bench:
    """All of it."""

    target: Target = Target()
    traffic: Traffic = Traffic()
    sampling: Sampling = Sampling()
    dataset: Dataset = Dataset()
    agentic: Agentic = Agentic()
    report: Report = Report()
    objectives: Objectives = Objectives()

    def __post_init__(self) -> None:
        traffic, sweep = self.traffic, self.report.sweep
        is_open = math.isfinite(traffic.request_rate) or traffic.ramp_up_strategy is not None
        if self.is_agentic:
            check(not is_open, "agents send their next turn when one ends: give no request_rate")
            check(not traffic.num_warmups, "agents warm up by themselves: give no num_warmups")
            check(traffic.num_prompts is None, "agents have agentic_sessions, no num_prompts")
        if sweep is not None:
            check(not is_open, f"sweep={sweep} is over concurrencies: give no request_rate")
            check(traffic.max_concurrency is None, "sweep gives each run its max_concurrency")

    @property
    def is_agentic(self) -> bool:
        """Whether sessions are played rather than single requests sent."""
        return self.dataset.dataset_name == "agentic"
