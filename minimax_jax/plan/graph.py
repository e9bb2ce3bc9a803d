"""Which work may run while a collective is under way: what neither waits for it nor is waited for.

The program is one graph, with the bodies of its calls in their places; a loop is one node, unless
ranks exchange something in it, when one round of it is. Work is counted in the operations of matrix
products.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from minimax_jax.plan.hlo import (
    Computations,
    Instruction,
    collective_kind,
    computations_of,
    rounds,
)

Value: TypeAlias = "int | list[Value]"  # a node's number, or those of a tuple's parts
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([0-9,]*)\}")


def work_beside(text: str) -> list[float]:
    """The operations that may run beside each collective, in the order of `hlo.collectives`."""
    computations, entry = computations_of(text)
    graph = _Graph(computations=computations)
    inputs = sum(one.opcode == "parameter" for one in computations[entry])
    graph.nodes += [_Node(operands=set(), flops=0.0, is_collective=False)] * inputs
    graph.add(entry, list(range(inputs)))
    nodes = graph.nodes
    before, after = _before(nodes), _after(nodes)
    working = [i for i, node in enumerate(nodes) if node.flops]
    return [
        sum((nodes[j].flops for j in working if not (before[i] | after[i]) >> j & 1), 0.0)
        for i, node in enumerate(nodes)
        if node.is_collective
    ]


def all_work(text: str) -> float:
    """The operations of all products that a run meets."""
    return sum(product_flops(*computations_of(text)).values(), 0.0)


def product_flops(computations: Computations, name: str) -> dict[str, float]:
    """The operations of each instruction of a computation that is a product or runs some."""
    of_name = {one.name: one for one in computations[name]}
    found = {}
    for one in computations[name]:
        if one.opcode == "dot":
            sizes = of_name[one.operands[0]].shapes[0][1]
            summed = _CONTRACTED.search(one.rest)
            assert summed is not None, one.rest
            depth = math.prod(sizes[int(axis)] for axis in summed[1].split(",") if axis)
            found[one.name] = 2.0 * depth * math.prod(one.shapes[0][1])
        elif one.callee is not None:
            inside = sum(product_flops(computations, one.callee).values(), 0.0)
            found[one.name] = (rounds(one, computations, 1) or 1) * inside
    return found


@dataclass(frozen=True, kw_only=True)
class _Node:
    operands: set[int]
    flops: float
    is_collective: bool


@dataclass(kw_only=True)
class _Graph:
    computations: Computations
    nodes: list[_Node] = field(default_factory=list)
    flops: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, name: str, arguments: list[Value]) -> Value:
        """Adds a computation's nodes; its result."""
        if name not in self.flops:
            self.flops[name] = product_flops(self.computations, name)
        values: dict[str, Value] = {}
        result: Value = []
        for one in self.computations[name]:
            operands = [values[operand] for operand in one.operands]
            node = _Node(
                operands=set(_flat(operands)),
                flops=self.flops[name].get(one.name, 0.0),
                is_collective=collective_kind(one) is not None,
            )
            result = values[one.name] = self._value(one, node, operands, arguments)
        return result  # the last instruction is the root

    def _value(
        self, one: Instruction, node: _Node, operands: list[Value], arguments: list[Value]
    ) -> Value:
        if one.opcode == "parameter":
            return arguments[int(one.rest.split(")")[0])]
        if one.opcode == "tuple":
            return operands
        if one.opcode == "get-tuple-element" and isinstance(operands[0], list):
            found = re.search(r"index=([0-9]+)", one.rest)
            assert found is not None, one.rest
            return operands[0][int(found[1])]
        if one.callee and (one.opcode == "call" or self._exchanges(one.callee)):
            return self.add(one.callee, operands)
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _exchanges(self, name: str) -> bool:
        return any(
            collective_kind(one) or (one.callee is not None and self._exchanges(one.callee))
            for one in self.computations[name]
        )


def _before(nodes: list[_Node]) -> list[int]:
    """Those that each node waits for, as bits: operands come before their users."""
    found: list[int] = []
    for node in nodes:
        mask = 0
        for operand in node.operands:
            mask |= found[operand] | 1 << operand
        found.append(mask)
    return found


def _after(nodes: list[_Node]) -> list[int]:
    """Those that wait for each node, as bits."""
    found = [0] * len(nodes)
    for i in reversed(range(len(nodes))):
        for operand in nodes[i].operands:
            found[operand] |= found[i] | 1 << i
    return found


def _flat(values: list[Value]) -> Iterator[int]:
    for value in values:
        yield from _flat(value) if isinstance(value, list) else (value,)
