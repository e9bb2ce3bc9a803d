"""The flags of `minimax-serve MODEL`, and what they ask for. Nothing of the model is read here."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from configs.cli import add_flags, from_flags
from configs.gateway import GatewayConfig
from configs.loading import LoadConfig
from configs.monitoring import MonitoringConfig
from configs.parallel import ParallelConfig
from configs.server import ServerConfig
from configs.serving import ServingConfig
from configs.speculative import SpeculativeConfig
from minimax_jax.mesh_flags import add_process_flags
from serving.command import objects
from serving.command.nested import OBJECTS, read_objects
from serving.command.others import add_others, answers, unknown

PROGRAM = "minimax-serve"
# Groups of the help, each the flags of one config.
CONFIGS: dict[str, type] = {
    "engine": ServingConfig,
    "model": LoadConfig,
    "gRPC": ServerConfig,
    "HTTP (the smg gateway)": GatewayConfig,
    "metrics and logs": MonitoringConfig,
}
FROM_SPECULATION = ("num_speculative_tokens",)  # which --speculative-config says
ALONE = {"distributed": False, "coordinator": None, "num_processes": None, "process_id": None}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the flags ask for. `engine` are the fields of `ServingConfig` that were given, since the
    defaults of the others depend on the model. `lines` say what accepted flags mean.
    """

    model: str
    engine: Mapping[str, Any]
    load: LoadConfig
    parallel: ParallelConfig
    server: ServerConfig
    gateway: GatewayConfig
    monitoring: MonitoringConfig
    speculative: SpeculativeConfig | None = None
    served_names: tuple[str, ...] = ()
    adapters: Mapping[str, Path]
    experts: str | None = None  # the format that --quantization-config.moe asks for
    place: argparse.Namespace  # among several processes, for `mesh_flags.joined`
    seed: int = 0
    lines: tuple[str, ...] = ()


class _Parser(argparse.ArgumentParser):
    """Its errors are ValueErrors, for the one place that prints sentences."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(arguments: Sequence[str]) -> Asked:
    """What the arguments ask for. Raises ValueError with one sentence for what is unknown, refused
    or impossible.
    """
    rest, given_objects = read_objects(arguments)
    parser = make_parser()
    options, left = parser.parse_known_args(rest)
    if left:
        known = [*parser._option_string_actions, *(f"--{name}" for name in OBJECTS)]
        raise ValueError(unknown(left[0], known))
    meant, lines = objects.meaning(given_objects)
    given = vars(options)
    lines += answers(given)
    experts, index_cp = meant.pop("moe", None), meant.pop("indexer_decode_cp", False)
    given |= meant
    speculative = None
    if (draft_options := given_objects.get("speculative-config")) is not None:
        speculative = objects.speculative(draft_options, options.model)
        lines += _backend_line(speculative)
    _check_ports(given)
    return Asked(
        model=options.model,
        engine={f.name: given[f.name] for f in fields(ServingConfig) if f.name in given},
        load=from_flags(LoadConfig, options),
        parallel=_parallel(given, index_cp=index_cp),
        server=from_flags(ServerConfig, options),
        gateway=from_flags(GatewayConfig, options),
        monitoring=from_flags(MonitoringConfig, options),
        speculative=speculative,
        served_names=tuple(given.get("served_model_name", ())),
        adapters=_adapters([*given.get("lora", ()), *given.get("lora_modules", ())]),
        experts=experts,
        place=argparse.Namespace(**{name: given.get(name, usual) for name, usual in ALONE.items()}),
        seed=given.get("seed", 0),
        lines=tuple(lines),
    )


def make_parser() -> argparse.ArgumentParser:
    """The parser of everything but objects and dotted flags."""
    parser = _Parser(
        prog=PROGRAM,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description="Serves a model over gRPC, and over HTTP through the smg gateway. "
        "`bench` as MODEL is the load generator, with flags of its own.",
        epilog=f"Objects, as JSON or with dots: {', '.join('--' + name for name in OBJECTS)}.",
    )
    parser.add_argument("model", metavar="MODEL", help="bundled name, folder, or hub name")
    names = "the model's name for clients; more names are aliases over HTTP"
    parser.add_argument("--served-model-name", nargs="+", metavar="NAME", help=names)
    parser.add_argument("--seed", type=int, help="of requests that bring none (default 0)")
    adapter: dict[str, Any] = {"action": "append", "metavar": "NAME=PATH"}
    parser.add_argument("--lora", **adapter, help="an adapter under a name of its own (repeatable)")
    parser.add_argument("--lora-modules", nargs="+", metavar="NAME=PATH", help="the same, several")
    _add_parallel(parser)
    for title, config in CONFIGS.items():
        add_flags(parser.add_argument_group(title), config, without=FROM_SPECULATION)
    parser.add_argument(
        "--no-http", dest="http", action="store_const", const="none", help="no HTTP"
    )
    add_others(parser)
    return parser


def _add_parallel(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("devices")
    group.add_argument("--tensor-parallel-size", "-tp", type=int, help="ranks of a replica")
    group.add_argument("--data-parallel-size", "-dp", type=int, help="replicas of attention")
    experts = "spreads whole experts over all ranks"
    on = argparse.BooleanOptionalAction
    group.add_argument("--enable-expert-parallel", "-ep", action=on, help=experts)
    context = "ranks of tp that share a long context in decode"
    group.add_argument("--decode-context-parallel-size", "-dcp", type=int, help=context)
    group.add_argument("--parallel", help="all of these as one word, such as tp4,ep or dep4")
    add_process_flags(parser.add_argument_group("several processes, each started with this"))


def _backend_line(speculative: SpeculativeConfig) -> list[str]:
    backend = speculative.attention_backend
    flag = f"--speculative-config.attention_backend {backend}"
    return [] if backend is None else [f"{flag}: {objects.DISPATCH}"]


def _parallel(given: Mapping[str, Any], *, index_cp: bool) -> ParallelConfig:
    """One object from either spelling. `index_cp`: all ranks of tp score blocks of index keys."""
    tp, dp = given.get("tensor_parallel_size", 1), given.get("data_parallel_size", 1)
    dcp = given.get("decode_context_parallel_size", tp if index_cp else 1)
    spread = given.get("enable_expert_parallel", False)
    if "parallel" in given:
        names = ("tensor_parallel_size", "data_parallel_size", "enable_expert_parallel")
        if any(name in given for name in (*names, "decode_context_parallel_size")):
            raise ValueError(f"--parallel {given['parallel']} and -tp, -dp, -ep, -dcp say it twice")
        return ParallelConfig.parse(given["parallel"])
    return ParallelConfig(tp=tp, dp=dp, ep=tp * dp if spread else 1, dcp=dcp)


def _adapters(texts: Sequence[str]) -> dict[str, Path]:
    adapters: dict[str, Path] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise ValueError(f"--lora {text!r} is not of the form name=path")
        if name in adapters:
            raise ValueError(f"--lora names {name!r} twice")
        if not (Path(path) / "adapter_config.json").is_file():
            raise ValueError(f"--lora {text!r}: there is no adapter_config.json in {path}")
        adapters[name] = Path(path)
    return adapters


def _check_ports(given: Mapping[str, Any]) -> None:
    """Raises ValueError where one port is to serve two things."""
    ports = {"--port": "50051", "--http": "8000", "--metrics-port": "8001"}
    ports |= {f: str(given[n]) for f in ports if (n := f[2:].replace("-", "_")) in given}
    taken: dict[str, str] = {}
    for flag, port in ports.items():
        if port in taken:
            raise ValueError(
                f"{taken[port]} and {flag} are both {port}: gRPC, HTTP and metrics need a port each"
            )
        if port not in ("0", "none"):
            taken[port] = flag
