"""The listeners of one server: one for each served name, and where theirs lets nobody in without a
key, one more for the gateway.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from configs.server import ServerConfig
from minimax_jax.chat import Tokenizer
from serving.command.resolve import Resolved
from serving.engine_api import Engine
from serving.gateway import Workers
from serving.lifetime import Lifetime
from serving.rpc.server import Server
from serving.rpc.service import ModelFiles
from serving.rpc.wire_state import Served

ANYWHERE = ("0.0.0.0", "::")
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Listeners:
    """The ports that were taken, by served name."""

    ports: Mapping[str, int]
    workers: Workers


def served(resolved: Resolved) -> Sequence[Served]:
    """The model under its name, and each adapter under its own."""
    path = str(resolved.folder.resolve())
    adapters = (Served(name=n, model_path=path, adapter=n) for n in resolved.asked.adapters)
    return [Served(name=resolved.name, model_path=path), *adapters]


async def listen(life: Lifetime, engine: Engine, resolved: Resolved) -> Listeners:
    """Starts them. The model's is on the port asked for, the adapters' on those after it."""
    config = resolved.asked.server
    folder = resolved.folder
    has_tokenizer = (folder / "tokenizer.json").is_file()
    tokenizer = Tokenizer.load(folder) if has_tokenizer else None
    files = ModelFiles(folder=folder, tokenizer=tokenizer)
    is_open = reaches_gateway(config)
    ports, inner = {}, {}
    for place, one in enumerate(served(resolved)):
        port = config.port + place if config.port else 0
        own = replace(config, port=port)
        ports[one.name] = inner[one.name] = await life.start(Server(engine, one, own, files))
        if not is_open and resolved.asked.gateway.http is not None:
            loopback = for_gateway(config)
            inner[one.name] = await life.start(Server(engine, one, loopback, files))
    return Listeners(ports=ports, workers=Workers(ports=inner, aliases=resolved.aliases))


def reaches_gateway(config: ServerConfig) -> bool:
    """Whether the gateway, which sends no key and trusts no certificate of ours, can use this."""
    needs_more = config.api_key or config.api_key_file or config.ssl_certfile
    return not needs_more and (config.host in (*ANYWHERE, "localhost") or config.host == LOOPBACK)


def for_gateway(config: ServerConfig) -> ServerConfig:
    """A listener of this machine alone, on a free port, that asks for nothing."""
    return ServerConfig(
        host=LOOPBACK,
        port=0,
        max_message_bytes=config.max_message_bytes,
        max_concurrent_requests=config.max_concurrent_requests,
        shutdown_timeout=config.shutdown_timeout,
        profile_dir=config.profile_dir,
    )
