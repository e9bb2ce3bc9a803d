"""Where a run's numbers go beside its own log: TensorBoard's event files, and Weights & Biases."""

import numbers
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from configs.rl import GRPOConfig

EVENTS = "events"  # the folder of a run that TensorBoard is pointed at


@runtime_checkable
class Sink(Protocol):
    """Takes the numbers of a step."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in `events/`; `tensorboard --logdir` over several runs compares them."""

    def __init__(self, out: Path):
        from tensorboard.summary import Writer

        self._writer = Writer(str(out / EVENTS))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of a project, named after the run's folder; a resumed run goes on in the same one."""

    def __init__(self, out: Path, config: GRPOConfig):
        import wandb  # pyright: ignore[reportMissingImports] (an extra that no test needs)

        name = out.absolute().name
        self._run = wandb.init(
            project=config.wandb,
            name=name,
            id=f"{name}-{config.seed}",
            resume="allow",
            dir=str(out),
            config=asdict(config),
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def check_sinks(config: GRPOConfig) -> None:
    """Raises ValueError for a sink whose package is not installed."""
    wanted = {"tensorboard": config.tensorboard, "wandb": config.wandb is not None}
    for package, is_wanted in wanted.items():
        if is_wanted and find_spec(package) is None:
            value = str(getattr(config, package)).lower()
            raise ValueError(
                f"{package}={value} needs the package {package}: "
                f"pip install 'minimax-jax[{package}]'"
            )


@contextmanager
def open_sinks(config: GRPOConfig, out: Path) -> Iterator[list[Sink]]:
    """The sinks that a config names; closed however the run ends."""
    sinks: list[Sink] = []
    try:
        if config.tensorboard:
            sinks.append(TensorBoard(out))
        if config.wandb is not None:
            sinks.append(WeightsAndBiases(out, config))
        yield sinks
    finally:
        for sink in sinks:
            sink.close()


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """What can be drawn of a record, its step aside."""
    return {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, numbers.Real) and name != "step"
    }
