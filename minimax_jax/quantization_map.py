"""A checkpoint's quantisation config against its headers: the headers decide, and what the config
says module by module has to agree with them (F07).

Checked are ModelOpt's `quantized_layers` and compressed-tensors' `config_groups`, which map
patterns to formats: each has to match something, and what it matches has to have that format. The
lists of exclusions may name what is not there, but nothing that they name may be quantised. A
pattern is a module's name in any layout and with any prefix that `names` knows, or the end of one,
or a parent; or a glob; or `re:` and a regular expression.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import translate
from pathlib import Path
from typing import Any

from minimax_jax import names
from minimax_jax.checkpoint.files import read_json
from minimax_jax.checkpoint.plan import LeafPlan
from minimax_jax.quantize import Form, is_projection

EXCLUSIONS = ("ignored_layers", "modules_to_not_convert", "exclude_modules", "ignore")
MODELOPT = "hf_quant_config.json"
_FULL_PREFIXES = (*names.PREFIXES, "")


def sections(folder: Path) -> list[Mapping[str, Any]]:
    """The quantisation sections of a folder: of `config.json`, and ModelOpt's own file."""
    root = read_json(folder / "config.json")
    text = root.get("text_config") or {}
    found = [root.get("quantization_config"), text.get("quantization_config")]
    if (folder / MODELOPT).is_file():
        found.append(read_json(folder / MODELOPT).get("quantization"))
    return [section for section in found if isinstance(section, Mapping)]


def map_problems(section: Mapping[str, Any], leaves: Iterable[LeafPlan]) -> list[str]:
    """What the section says about single modules and the headers do not bear out."""
    modules = _Modules(leaves)
    excluded = modules.excluded(section)
    problems = [
        f"{module} is stored as {modules.form[module]}, but the quantization config excludes it by "
        f"{pattern!r}"
        for module, pattern in excluded.items()
        if modules.form[module] != "plain"
    ]
    for pattern, said in _mapped(section):
        form = _form(said)
        matching = modules.matching(pattern)
        if form is None:
            problems.append(
                f"the quantization config gives {pattern!r} the unknown format {said!r}"
            )
        elif not matching and not names.known_part(pattern + "."):
            problems.append(f"{pattern!r} of the quantization config matches no tensor")
        for module in matching:
            if form is not None and modules.form[module] != form and module not in excluded:
                problems.append(
                    f"{module} is stored as {modules.form[module]}, but the quantization config "
                    f"says {said} by {pattern!r}"
                )
    return problems


def one_format_problems(
    section: Mapping[str, Any], leaves: Iterable[LeafPlan], form: Form
) -> list[str]:
    """Projections that are not in the one form that a whole section stands for, nor excluded."""
    leaves = list(leaves)
    excluded = _Modules(leaves).excluded(section)
    return [
        f"{leaf.tensors[0].parts[0]} is stored as {leaf.form}, but the quantization config says "
        f"{form}"
        for leaf in leaves
        if is_projection(leaf.path)
        and leaf.form != form
        and leaf.place.name.removesuffix(".weight") not in excluded
    ]


class _Modules:
    """The text model's matrices by name, in all layouts, without prefix."""

    def __init__(self, leaves: Iterable[LeafPlan]):
        self.form: dict[str, Form] = {}
        for leaf in leaves:
            for place in names.places(leaf.path):
                for name in place.names(leaf.shape[0]):
                    self.form[name.removesuffix(".weight")] = leaf.form
        self.children: dict[str, list[str]] = {}
        for module in self.form:
            parts = module.split(".")
            for i in range(1, len(parts)):
                self.children.setdefault(".".join(parts[:i]), []).append(module)

    def excluded(self, section: Mapping[str, Any]) -> dict[str, str]:
        """Modules that a section excludes from quantisation, with the pattern that says so."""
        patterns = [p for key in EXCLUSIONS for p in section.get(key) or ()]
        return {module: p for p in reversed(patterns) for module in self.matching(p)}

    def matching(self, pattern: str) -> list[str]:
        if pattern.startswith("re:") or any(c in pattern for c in "*?["):
            regular = pattern.startswith("re:")
            expression = re.compile(pattern[3:] if regular else translate(pattern))
            return [m for m in self.form if any(map(expression.match, _full_names(m)))]
        for name in (pattern, names.strip_prefix(pattern + ".") or ""):
            name = name.removesuffix(".")
            if name in self.form:
                return [name]
            if name in self.children:
                return self.children[name]
        return [m for m in self.form if m.endswith(f".{pattern}")]


def _full_names(module: str) -> Iterator[str]:
    for prefix in _FULL_PREFIXES:
        yield prefix + module
    if module == "lm_head":
        yield names.RELEASED_HEAD.removesuffix(".")


def _mapped(section: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Patterns with what is said of them."""
    for pattern, entry in (section.get("quantized_layers") or {}).items():
        yield pattern, str(entry.get("quant_algo") if isinstance(entry, Mapping) else entry)
    for group in (section.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        said = group.get("format") or f"{weights.get('num_bits')} bits"
        for target in group.get("targets") or ():
            if "." in target or target.startswith("re:"):  # others are classes, such as Linear
                yield target, str(said)


def _form(said: str) -> Form | None:
    word = said.lower()
    if "nvfp4" in word:
        return "nvfp4"
    if "mxfp8" in word:
        return "mxfp8"
    return "plain" if word in ("none", "bf16", "dense") else None
