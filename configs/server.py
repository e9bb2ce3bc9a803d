"""Where a server listens, whom it lets in and how much it takes: the names of vLLM's flags."""

from dataclasses import dataclass

from configs.cli import described
from configs.parts import check, check_positive


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """One gRPC listener over an engine, which others may share. Files are read when it starts."""

    host: str = described("127.0.0.1", "the address to listen on; this machine alone")
    port: int = described(50051, "the port of gRPC; 0 takes a free one")
    max_message_bytes: int = described(32 << 20, "bytes of a request message")
    max_concurrent_requests: int = described(1024, "requests at a time; more are turned away")
    shutdown_timeout: float = described(30.0, "seconds that running requests get to end on SIGTERM")
    api_key: str | None = described(None, "the bearer token that calls must carry")
    api_key_file: str | None = described(None, "a file that holds it, out of the list of processes")
    ssl_certfile: str | None = described(None, "the server's certificate chain, PEM")
    ssl_keyfile: str | None = described(None, "the key of that certificate, PEM")
    ssl_ca_certs: str | None = described(None, "asks clients for a certificate of these, PEM")
    profile_dir: str | None = described(None, "allows profiling, into folders below this one")

    def __post_init__(self) -> None:
        check(bool(self.host), "host is empty")
        check(0 <= self.port < 1 << 16, f"port={self.port} is not in 0..65535")
        check_positive(self, "max_message_bytes", "max_concurrent_requests")
        check(
            0 <= self.shutdown_timeout < float("inf"),
            f"shutdown_timeout={self.shutdown_timeout} is not a number of seconds",
        )
        check(
            self.api_key is None or self.api_key_file is None,
            "api_key and api_key_file are two ways to say one thing",
        )
        check(
            (self.ssl_certfile is None) == (self.ssl_keyfile is None),
            f"ssl_certfile={self.ssl_certfile!r} and ssl_keyfile={self.ssl_keyfile!r} go together",
        )
        check(
            self.ssl_ca_certs is None or self.ssl_certfile is not None,
            f"ssl_ca_certs={self.ssl_ca_certs!r} needs ssl_certfile and ssl_keyfile",
        )
