"""The rules of the house, as functions from source text to complaints.

A checker takes one `Module`, or all of them where the rule is about all, and returns sentences.
The tests of the project and the tests of the checkers call the same functions.
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent

# Floors: imports go down only. What each package may import of the project beside itself.
FLOORS = {
    "configs": set(),
    "pallas_kernels": set(),
    "sharding": {"configs"},
    "minimax_jax": {"configs", "pallas_kernels", "sharding"},
    "serving": {"configs", "sharding", "minimax_jax"},
    "rl": {"configs", "sharding", "minimax_jax"},
}
# The one way up: the trainer's command may hand it the engine, as a `RolloutFn`.
WAY_UP = {"rl/__main__.py": {"serving"}}
# Other projects that each package may import: the base install and nothing heavier.
ARRAYS = {"jax", "numpy", "ml_dtypes", "jaxtyping"}
FILES_AND_TEXT = {"safetensors", "tokenizers", "jinja2", "huggingface_hub", "pydantic", "rich"}
GRPC = {"grpc", "grpc_health", "grpc_reflection", "google", "smg_grpc_proto"}
WEB = {"httpx2", "prometheus_client"}
SERVING_ALONE = {"flax", "llguidance", "matplotlib", "prometheus_client"}
TRAINING_ALONE = {"flax", "optax", "orbax", "matplotlib", "pebble"}
TRAINING_EXTRAS = {"math_verify", "pyarrow", "tensorboard", "wandb"}
THIRD_PARTY = {
    "configs": set(),
    "pallas_kernels": ARRAYS | {"jaxlib", "jax_triton", "triton"},
    "sharding": ARRAYS,
    "minimax_jax": ARRAYS | FILES_AND_TEXT | {"flax", "matplotlib"},
    "serving": ARRAYS | FILES_AND_TEXT | GRPC | WEB | SERVING_ALONE,
    "rl": ARRAYS | FILES_AND_TEXT | TRAINING_ALONE | TRAINING_EXTRAS,
}
# The host decides without jax: these import the standard library, configs and one another.
HOST_ONLY = "serving/scheduling/"
# jax_triton cannot be imported without a GPU build of JAX, hence where it is used; matplotlib takes
# 0.4 s of every command's start, which one flag of one command needs; the others are in an extra.
LATE_IMPORTS = {"jax_triton", "matplotlib"} | TRAINING_EXTRAS

MAX_FILE_LINES = {"pallas_kernels": 400, "tests": 400}  # all others:
MAX_FILE_LINES_ELSEWHERE = 260
MAX_FUNCTION_LINES = {"pallas_kernels": 120}  # all others:
MAX_FUNCTION_LINES_ELSEWHERE = 60
MAX_NESTED_LINES = 5
TOO_BROAD = {"Exception", "BaseException"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A source file; `path` is relative to the repository, with forward slashes."""

    path: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, self.path)

    @property
    def package(self) -> str:
        return self.path.partition("/")[0]

    @property
    def name(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def read_modules(packages: Iterable[str]) -> list[Module]:
    """All source files of the packages, in order of their paths."""
    files = sorted(file for package in packages for file in (ROOT / package).rglob("*.py"))
    return [Module(file.relative_to(ROOT).as_posix(), file.read_text("utf-8")) for file in files]


# ---- rules about imports and names


def import_direction(module: Module) -> list[str]:
    """Imports that neither the floors nor the list of other projects allow."""
    project, others = FLOORS[module.package] | {module.package}, THIRD_PARTY[module.package]
    if module.path.startswith(HOST_ONLY):
        return _beyond_the_host(module)
    allowed = project | WAY_UP.get(module.path, set()) | others | sys.stdlib_module_names
    tops = {name.partition(".")[0] for name in imported_names(module.tree)}
    return [f"{module.path} imports {top}" for top in sorted(tops - allowed)]


def _beyond_the_host(module: Module) -> list[str]:
    """Imports of a file of the host beside the standard library, configs and its own package."""
    known, outside = {"configs", *sys.stdlib_module_names}, set()
    for name in imported_names(module.tree):
        inside = f"{name.replace('.', '/')}/".startswith(HOST_ONLY)
        if not inside and name.partition(".")[0] not in known:
            outside.add(name)
    return [f"{module.path} imports {name}" for name in sorted(outside)]


def import_form(module: Module) -> list[str]:
    """Relative imports, and imports inside a function."""
    complaints = [
        f"{module.path}:{node.lineno} imports relatively"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    for function in functions(module.tree):
        late = {name.partition(".")[0] for name in imported_names(function)} - LATE_IMPORTS
        complaints += [f"{module.path}: {function.name} imports {n}" for n in sorted(late)]
    return complaints


def partition_spec(module: Module) -> list[str]:
    """PartitionSpec, or JAX's short name for it, outside `sharding`."""
    names = set(imported_names(module.tree)) | set(attribute_chains(module.tree))
    specs = {n for n in names if n.endswith("PartitionSpec") or n in ("jax.P", "jax.sharding.P")}
    return [f"{module.path} uses {name}" for name in sorted(specs) if module.package != "sharding"]


def jax_experimental(modules: Iterable[Module]) -> list[str]:
    """`jax.experimental` outside the kernels and one file of serving."""
    users = [m for m in modules if m.package != "pallas_kernels" and _uses_experimental(m)]
    complaints = [f"{m.path} uses jax.experimental" for m in users if m.package != "serving"]
    serving = [m.path for m in users if m.package == "serving"]
    if len(serving) > 1:
        complaints.append(f"{' and '.join(serving)} use jax.experimental; one file may")
    return complaints


def private_imports(modules: Iterable[Module]) -> list[str]:
    """Another project's private modules, outside one file of the kernels."""
    users = [module for module in modules if _imports_private(module)]
    complaints = [f"{m.path} imports private names" for m in users if m.package != "pallas_kernels"]
    kernels = [m.path for m in users if m.package == "pallas_kernels"]
    if len(kernels) > 1:
        complaints.append(f"{' and '.join(kernels)} import private names; one file may")
    return complaints


def import_cycle(modules: Sequence[Module]) -> list[str]:
    """One circle of imports among the modules, if there is any."""
    names = {module.name for module in modules}
    graph = {m.name: _project_imports(m, names) - {m.name} for m in modules}
    while leaves := [name for name, imports in graph.items() if not imports & graph.keys()]:
        for name in leaves:
            del graph[name]
    if not graph:
        return []
    walk = [min(graph)]  # every module left imports one that is left, so the walk meets itself
    while walk[-1] not in walk[:-1]:
        walk.append(min(graph[walk[-1]] & graph.keys()))
    return [" -> ".join(walk[walk.index(walk[-1]) :])]


# ---- rules about sizes and errors


def file_length(module: Module) -> list[str]:
    """A file that outgrows its budget holds two ideas."""
    lines = len(module.source.splitlines())
    limit = MAX_FILE_LINES.get(module.package, MAX_FILE_LINES_ELSEWHERE)
    return [f"{module.path} has {lines} lines, {limit} at most"] if lines > limit else []


def function_length(module: Module) -> list[str]:
    """Functions above their budget, docstrings not counted."""
    limit = MAX_FUNCTION_LINES.get(module.package, MAX_FUNCTION_LINES_ELSEWHERE)
    return _too_long(module, functions(module.tree), limit)


def nested_function_length(module: Module) -> list[str]:
    """Functions inside functions above their budget; kernels and tests are free of it."""
    if module.package in ("pallas_kernels", "tests"):
        return []
    outer = functions(module.tree)
    nested = {inner for f in outer for statement in f.body for inner in functions(statement)}
    return _too_long(module, nested, MAX_NESTED_LINES)


def broad_except(module: Module) -> list[str]:
    """Handlers that catch everything, and handlers that do nothing."""
    complaints = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler):
            caught = set(name_references(node.type)) if node.type else TOO_BROAD
            if caught & TOO_BROAD:
                complaints.append(f"{module.path}:{node.lineno} catches everything")
            if all(isinstance(statement, ast.Pass) for statement in node.body):
                complaints.append(f"{module.path}:{node.lineno} drops an error silently")
    return complaints


# ---- the rule about configs


def config_fields(modules: Iterable[Module]) -> set[str]:
    """`Class.field` for each field of each dataclass in `configs`."""
    return {
        f"{node.name}.{field.target.id}"
        for module in modules
        if module.package == "configs"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and "dataclass" in _decorators(node)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def unread_fields(modules: Sequence[Module]) -> set[str]:
    """The fields that nothing reads.

    A read is an attribute of that name outside `configs`, or in a function of `configs` whose own
    name is used there, directly or through other such functions; so a check in `__post_init__`
    is none.
    """
    inside = [m for m in modules if m.package == "configs"]
    definitions: dict[str, list[Function]] = {}
    for function in (f for m in inside for f in functions(m.tree)):
        definitions.setdefault(function.name, []).append(function)
    used, attributes = set(), set()
    pending: list[ast.AST] = [m.tree for m in modules if m.package != "configs"]
    while pending:
        tree = pending.pop()
        attributes |= set(attribute_references(tree))
        names = set(attribute_references(tree)) | set(name_references(tree))
        new = names & definitions.keys() - used
        used |= new
        pending += [function for name in new for function in definitions[name]]
    return {f for f in config_fields(modules) if f.partition(".")[2] not in attributes}


# ---- reading a syntax tree


def functions(tree: ast.AST) -> list[Function]:
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def imported_names(tree: ast.AST) -> Iterator[str]:
    """`a.b` of `import a.b` and `a.b.c` of `from a.b import c`, wherever they stand."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attribute_chains(tree: ast.AST) -> Iterator[str]:
    """`a.b.c` as it is written."""
    return (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def attribute_references(tree: ast.AST) -> Iterator[str]:
    """`b` of every `a.b` that is read."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr


def name_references(tree: ast.AST) -> Iterator[str]:
    return (node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


def _uses_experimental(module: Module) -> bool:
    names = [*imported_names(module.tree), *attribute_chains(module.tree)]
    return any(f"{name}.".startswith("jax.experimental.") for name in names)


def _imports_private(module: Module) -> bool:
    foreign = (n for n in imported_names(module.tree) if n.partition(".")[0] not in FLOORS)
    parts = {part for name in foreign for part in name.split(".")}
    return any(part.startswith("_") and not part.startswith("__") for part in parts)


def _project_imports(module: Module, project: set[str]) -> set[str]:
    """The modules of the project that a module imports: the longest prefix of each name."""
    found = set()
    for name in imported_names(module.tree):
        parts = name.split(".")
        prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        found |= set(next(([prefix] for prefix in prefixes if prefix in project), []))
    return found


def _too_long(module: Module, found: Iterable[Function], limit: int) -> list[str]:
    lengths = [(f.name, f.lineno, _lines_without_docstring(f)) for f in found]
    return [
        f"{module.path}:{line} {name} has {length} lines, {limit} at most"
        for name, line, length in lengths
        if length > limit
    ]


def _lines_without_docstring(function: Function) -> int:
    first = function.body[0]
    has_docstring = ast.get_docstring(function, clean=False) is not None
    docstring_lines = first.end_lineno - first.lineno + 1 if has_docstring else 0
    return function.end_lineno - function.lineno + 1 - docstring_lines


def _decorators(node: ast.ClassDef) -> set[str]:
    calls = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return {ast.unparse(decorator).rpartition(".")[2] for decorator in calls}
