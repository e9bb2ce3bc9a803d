"""The value of one argument: elements as the model nested them, to JSON by the schema.

Objects are named elements, lists are `<item>` elements, and whatever stands in no element is text
(specification model 4.4). Between elements white space is layout; other text there is kept, under
`$text` in an object and as an item of its own in a list.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from minimax_jax.chat.literals import BLANK, leaf_json, string_json
from minimax_jax.chat.schema import Schema

ITEM = "item"
TEXT_KEY = "$text"


@dataclass(slots=True)
class Element:
    """An argument or an element inside one, while it is read: its text and elements in order."""

    name: str
    schema: Schema
    parts: "list[str | Element]" = field(default_factory=list)
    num_children: int = 0
    json: str = ""  # once it is closed

    def add(self, name: str) -> "Element":
        """Opens an element in this one."""
        schema = self.schema
        is_item = name == ITEM and not schema.declares(ITEM)
        if "array" in schema.types and (is_item or "object" not in schema.types):
            child = Element(name, schema.item(self.num_children))
        else:
            child = Element(name, schema.property(name))
        self.parts.append(child)
        self.num_children += 1
        return child

    def close(self) -> None:
        """Nothing more comes: fixes the value. The elements inside have theirs already."""
        self.json = _element_json(self, self.schema)


def arguments_json(elements: list[Element]) -> str:
    """The JSON text of what has one name: a closed element, or several, which are a list."""
    if len(elements) == 1:
        return elements[0].json
    schema = elements[0].schema
    if "array" in schema.types:
        values = [_element_json(one, schema.item(index)) for index, one in enumerate(elements)]
    else:
        values = [one.json for one in elements]
    return f"[{', '.join(values)}]"


def _element_json(element: Element, schema: Schema) -> str:
    runs = list(_runs(element))
    if not element.num_children:
        return leaf_json("".join(map(str, runs)), schema.types)
    if _is_list(element, schema):
        return _list_json(runs, schema)
    return _object_json(runs)


def _runs(element: Element) -> Iterator[str | Element]:
    """The parts, with text that came in several pieces joined."""
    for is_text, run in groupby(element.parts, lambda part: isinstance(part, str)):
        if is_text:
            yield "".join(map(str, run))
        else:
            yield from run


def _is_list(element: Element, schema: Schema) -> bool:
    """The schema decides where it can, else whether all elements are called `item`."""
    if ("array" in schema.types) != ("object" in schema.types):
        return "array" in schema.types
    names = {part.name for part in element.parts if isinstance(part, Element)}
    return names == {ITEM} and not schema.declares(ITEM)


def _list_json(runs: list[str | Element], schema: Schema) -> str:
    values = []
    for run in runs:
        if isinstance(run, Element):
            values.append(run.json)
        elif run.strip(BLANK):
            values.append(leaf_json(run, schema.item(len(values)).types))
    return f"[{', '.join(values)}]"


def _object_json(runs: list[str | Element]) -> str:
    named: dict[str, list[Element]] = {}
    for run in runs:
        if isinstance(run, Element):
            named.setdefault(run.name, []).append(run)
    members = {name: arguments_json(elements) for name, elements in named.items()}
    text = "".join(run for run in runs if isinstance(run, str))
    if text.strip(BLANK):
        key = TEXT_KEY
        while key in members:
            key = f"${key}"
        members[key] = string_json(text)
    return f"{{{', '.join(f'{string_json(name)}: {value}' for name, value in members.items())}}}"
