"""What a tool's JSON schema says about one value: its types, its properties, its items.

Schemas come from clients in every shape, so nothing is refused here: whatever a schema does not
say, or says in a way that makes no sense, allows everything.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

JSON_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
# Names of Python and other languages that tool authors write for JSON's.
OTHER_NAMES = {
    **{"str": "string", "text": "string", "int": "integer", "float": "number", "double": "number"},
    **{"bool": "boolean", "list": "array", "dict": "object"},
}
TYPE_OF_NAME = {**{name: name for name in JSON_TYPES}, **OTHER_NAMES}
TYPE_OF_VALUE = {
    **{str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"},
    **{list: "array", dict: "object"},
}
Types = frozenset[str]
ANY: Types = frozenset()


class Schema:
    """One value's schema; `root` is the document that its references point into."""

    def __init__(self, node: Any = None, root: Any = None):
        self._root = node if root is None else root
        self._node = _resolved(node, self._root)
        self._properties: dict[str, Schema] = {}

    @cached_property
    def types(self) -> Types:
        """The JSON types that the value may have; empty if it may have any."""
        return _types(self._node, self._root, {}) or ANY

    @cached_property
    def is_text(self) -> bool:
        """Whether the value is a string, or null where the schema allows that, and nothing else."""
        return "string" in self.types and self.types <= {"string", "null"}

    def declares(self, name: str) -> bool:
        """Whether objects of this schema have a property of this name."""
        return any(name in _part(node, "properties", Mapping) for node in self._branches())

    def property(self, name: str) -> "Schema":
        """The schema of a property; if it is not declared, that of additional properties."""
        if name not in self._properties:
            self._properties[name] = self._union(
                _part(node, "properties", Mapping).get(name, node.get("additionalProperties"))
                for node in self._branches()
            )
        return self._properties[name]

    def item(self, index: int) -> "Schema":
        """The schema of a list's item."""
        return self._union(_item(node, index) for node in self._branches())

    def names(self) -> Iterator[str]:
        """Every property name that is declared anywhere in the document."""
        seen, waiting = set(), [self._root]
        while waiting:
            node = waiting.pop()
            if id(node) in seen or not isinstance(node, (Mapping, list, tuple)):
                continue
            seen.add(id(node))
            if isinstance(node, Mapping):
                yield from filter(_is_text, _part(node, "properties", Mapping))
            waiting.extend(node.values() if isinstance(node, Mapping) else node)

    def _union(self, nodes: Iterator[Any]) -> "Schema":
        found = [node for node in nodes if isinstance(node, Mapping)]
        return Schema(found[0] if len(found) == 1 else {"anyOf": found}, self._root)

    def _branches(self) -> Iterator[Mapping[str, Any]]:
        """The schema's node and the parts that it is composed of, each once."""
        seen, waiting = set(), [self._node]
        while waiting:
            node = waiting.pop(0)
            if id(node) not in seen:
                seen.add(id(node))
                yield node
                for key in ("allOf", "anyOf", "oneOf"):
                    waiting += [_resolved(part, self._root) for part in _part(node, key, list)]


def _is_text(name: Any) -> bool:
    return isinstance(name, str)


def _part(node: Mapping[str, Any], key: str, kind: type) -> Any:
    """A part of a schema, empty if it is missing or of another kind."""
    part = node.get(key)
    return part if isinstance(part, kind) else kind() if kind is list else {}


def _item(node: Mapping[str, Any], index: int) -> Any:
    """`items` for all, or tuples by place: `prefixItems`, formerly a list of `items`."""
    items = node.get("items")
    places = _part(node, "prefixItems", list) or (items if isinstance(items, list) else [])
    if index < len(places):
        return places[index]
    return node.get("additionalItems") if isinstance(items, list) else items


def _resolved(node: Any, root: Any) -> Mapping[str, Any]:
    """The node that a chain of references within the document ends in; {} if it leads nowhere."""
    seen = set()
    while isinstance(node, Mapping) and isinstance(node.get("$ref"), str):
        if id(node) in seen:
            return {}
        seen.add(id(node))
        node = _pointed_to(node["$ref"], root)
    return node if isinstance(node, Mapping) else {}


def _pointed_to(reference: str, root: Any) -> Any:
    """The place of a JSON pointer such as `#/$defs/Point`."""
    head, *path = reference.split("/")
    node = root if head == "#" else None
    for step in path:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list):
            node = node[int(step)] if step.isdecimal() and int(step) < len(node) else None
        else:
            node = node.get(step) if isinstance(node, Mapping) else None
    return node


def _types(node: Mapping[str, Any], root: Any, known: dict[int, Types | None]) -> Types | None:
    """The types of a node; None while they are being found, which a schema that contains itself
    runs into. `known` makes each node cost once.
    """
    if id(node) not in known:
        known[id(node)] = None
        known[id(node)] = _stated_types(node) or _composed_types(node, root, known)
    return known[id(node)]


def _stated_types(node: Mapping[str, Any]) -> Types:
    stated = node.get("type")
    names = stated if isinstance(stated, (list, tuple)) else [stated]
    types = {TYPE_OF_NAME[name] for name in names if isinstance(name, str) and name in TYPE_OF_NAME}
    if types and node.get("nullable") is True:
        types.add("null")
    return frozenset(types)


def _composed_types(node: Mapping[str, Any], root: Any, known: dict[int, Types | None]) -> Types:
    """Types of a node without `type`: from its parts, its values, or what it says of members."""
    for key in ("anyOf", "oneOf"):
        parts = [_types(_resolved(part, root), root, known) for part in _part(node, key, list)]
        found = [types for types in parts if types is not None]
        if found:
            return frozenset().union(*found) if all(found) else ANY
    for part in _part(node, "allOf", list):
        if types := _types(_resolved(part, root), root, known):
            return types
    values = _part(node, "enum", list) or ([node["const"]] if "const" in node else [])
    if values:
        return frozenset(
            TYPE_OF_VALUE[type(value)] for value in values if type(value) in TYPE_OF_VALUE
        )
    if "properties" in node:
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in node or "prefixItems" in node else ANY
