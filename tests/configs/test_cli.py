"""Flags and config files: what they accept and the sentences they refuse with."""

import re
from dataclasses import dataclass, field
from typing import Literal

import pytest

from configs.cli import from_flags, make_parser, read_config
from configs.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class Part:
    heads: int = 8
    kv_heads: int = 4

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")


@dataclass(frozen=True, kw_only=True)
class Run:
    name: str
    steps: int = field(default=10, metadata={"help": "number of updates"})
    rate: float = 0.5
    shuffle: bool = True
    dtype: Literal["bf16", "f32"] = "bf16"
    limit: int | None = None
    layers: tuple[int, ...] = ()
    part: Part = Part()
    parallel: ParallelConfig = ParallelConfig()


PRESETS = {"short": lambda: Run(name="short", steps=1)}


def parse(*flags: str) -> Run:
    return from_flags(Run, make_parser(Run, "run", "Runs.").parse_args(flags))


def test_flags_set_fields_of_every_kind():
    flags = "--name a --steps 3 --rate 2 --no-shuffle --dtype f32 --limit 5 --parallel tp4,sp"
    assert parse(*flags.split(), "--layers", "[0, 2]") == Run(
        name="a",
        steps=3,
        rate=2.0,
        shuffle=False,
        dtype="f32",
        limit=5,
        layers=(0, 2),
        parallel=ParallelConfig(tp=4, sp=True),
    )


def test_text_of_a_flag_is_never_read_as_a_number():
    assert parse("--name", "12") == Run(name="12")


def test_none_is_a_value():
    assert parse("--name", "a", "--limit", "none").limit is None


@pytest.mark.parametrize("flags", [["--name", "a", "--stepz", "3"], ["--nam", "a"], []])
def test_unknown_abbreviated_and_missing_flags_exit(flags, capsys):
    with pytest.raises(SystemExit) as error:
        parse(*flags)
    assert error.value.code == 2
    assert "run: error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--steps", "x"], "steps='x' is not of type int"),
        (["--steps", "1.5"], "steps=1.5 is not of type int"),
        (["--steps", "true"], "steps=True is not of type int"),
        (["--dtype", "f16"], "dtype='f16' is not one of bf16, f32"),
        (["--layers", "[1, 'a']"], "layers='a' is not of type int"),
        (["--parallel", "tp4,dcp3"], "dcp=3 does not divide tp=4"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(flags, sentence):
    with pytest.raises(ValueError, match="^" + re.escape(sentence)):
        parse("--name", "a", *flags)


def test_a_preset_with_overrides():
    run = read_config(Run, PRESETS, "short", ["rate=0.25", "name=long run", "part.heads=12"])
    assert run == Run(name="long run", steps=1, rate=0.25, part=Part(heads=12))


def test_overrides_of_one_part_are_checked_together():
    run = read_config(Run, PRESETS, "short", ["part.heads=9", "part.kv_heads=3"])
    assert run.part == Part(heads=9, kv_heads=3)


def test_a_toml_file_with_a_nested_part(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('name = "a"\nlayers = [1]\nparallel = "dep2"\n[part]\nheads = 4\n')
    run = read_config(Run, PRESETS, str(path), ["steps=2"])
    parallel = ParallelConfig(dp=2, ep=2)
    assert run == Run(name="a", layers=(1,), parallel=parallel, part=Part(heads=4), steps=2)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("steps = 1", "Run needs a value for name"),
        ('name = "a"\nstepz = 1', "stepz is unknown; there are name, steps"),
        ('name = "a"\n[part]\nhead = 1', "part.head is unknown; there are heads, kv_heads"),
        ('name = "a"\npart = 3', "part=3 is not of type Part"),
        ("name =", "{path} is not TOML"),
    ],
)
def test_a_wrong_toml_file_is_refused(text, sentence, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match="^" + re.escape(sentence.format(path=path))):
        read_config(Run, PRESETS, str(path))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["steps"], "'steps' is not of the form key=value"),
        (["part=1", "part.heads=2"], "'part.heads=2' reaches into 'part'"),
        (["part.heads=2", "part=1"], "'part=1' is not of the form key=value"),
        (["parts.heads=2"], "parts is unknown"),
        (["steps.x=2"], "steps={'x': '2'} is not of type int"),
        (["part.heads=7"], "heads=7 is not a multiple of kv_heads=4"),
    ],
)
def test_a_wrong_override_is_refused(overrides, sentence):
    with pytest.raises(ValueError, match="^" + re.escape(sentence)):
        read_config(Run, PRESETS, "short", overrides)


def test_a_python_file_is_refused_and_not_executed(tmp_path):
    path = tmp_path / "run.py"
    path.write_text("raise SystemExit('executed')")
    with pytest.raises(ValueError, match="is neither a TOML file nor one of short"):
        read_config(Run, PRESETS, str(path))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no config file"):
        read_config(Run, PRESETS, str(tmp_path / "none.toml"))
