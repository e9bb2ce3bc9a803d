"""Functions of a Python file as tools: their schemas, and calls by name with JSON arguments.

The file is executed, so it must be one that the user named. A schema comes from a function's type
hints; its description, and its parameters' after a line "Args:", from the docstring.
"""

import importlib.util
import inspect
import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pydantic

Function = Callable[..., Any]
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class PythonTools:
    """The public functions that a module defines, in its order."""

    def __init__(self, functions: Mapping[str, Function]):
        """Raises ValueError, in one sentence, for a function that cannot be a tool."""
        self.definitions = [_definition(name, one) for name, one in functions.items()]
        self._functions = {n: pydantic.validate_call(one) for n, one in functions.items()}

    @classmethod
    def load(cls, path: str | Path) -> "PythonTools":
        """Executes the file and takes its functions; ValueError if that fails or there are none."""
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"{path} is not a Python file with tools")
        module = _executed(path)
        functions = {
            name: value
            for name, value in vars(module).items()
            if inspect.isfunction(value)
            and value.__module__ == module.__name__
            and not name.startswith("_")
        }
        if not functions:
            raise ValueError(f"{path} defines no public function to be used as a tool")
        return cls(functions)

    def call(self, name: str, arguments: str) -> str:
        """What the model gets to read: the result, as JSON unless it is text, or the error."""
        function = self._functions.get(name)
        if function is None:
            return f"error: there is no tool {name!r}, only {', '.join(self._functions)}"
        try:
            values = json.loads(arguments)
        except ValueError as error:
            return f"error: the arguments of {name} are not JSON: {error}"
        result, error = _outcome(lambda: function(**values))
        if error is not None:
            return f"error: {_told(error)}"
        if isinstance(result, str):
            return result
        return pydantic.TypeAdapter(Any).dump_json(result, fallback=str).decode("utf-8")


def _executed(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file with tools")
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    _, error = _outcome(lambda: loader.exec_module(module))
    if error is not None:
        raise ValueError(f"{path} cannot be executed: {_told(error)}") from error
    return module


def _outcome(run: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """The result of foreign code, or what it raised, whatever that is."""
    thread = ThreadPoolExecutor(1)  # whose futures hold any error, without a handler for all
    try:
        future = thread.submit(run)
        error = future.exception()
    finally:
        thread.shutdown(wait=False)  # Ctrl-C need not wait for a call that hangs
    return (None if error else future.result()), error


def _told(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, pydantic.ValidationError):
        faults = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        return "; ".join(faults)
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def _definition(name: str, function: Any) -> dict[str, Any]:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in NAMED:
            raise ValueError(f"the tool {name} has {parameter}, which a call cannot give by name")
        if parameter.annotation is parameter.empty:
            raise ValueError(f"the tool {name} has no type hint for {parameter.name}")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"the tool {name} is a coroutine: expected a plain function")
    try:
        schema = pydantic.TypeAdapter(function).json_schema()
    except (pydantic.PydanticUserError, NameError) as error:
        raise ValueError(f"the tool {name} has hints without a schema: {_told(error)}") from error
    description, parameters = _documented(function)
    schema = _without_titles(schema)
    for parameter, text in parameters.items():
        schema.get("properties", {}).get(parameter, {}).setdefault("description", text)
    definition = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": definition}


def _documented(function: Function) -> tuple[str, dict[str, str]]:
    """The docstring before "Args:", and what it says about each parameter after that."""
    text = inspect.getdoc(function) or ""
    description, _, rest = text.partition("\nArgs:\n")
    section = re.split(r"\n(?=\S)", rest)[0]  # up to the next line without an indent
    entry = re.compile(r"^ +(\w+)(?: \(.*?\))?: (.*(?:\n {8,}.*)*)", re.MULTILINE)
    parameters = {name: " ".join(told.split()) for name, told in entry.findall(section)}
    return description.strip(), parameters


def _without_titles(schema: Any) -> Any:
    """A schema without the titles that only repeat names."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {k: v for k, v in schema.items() if k != "title" or not isinstance(v, str)}
    return {key: _without_titles(value) for key, value in kept.items()}
