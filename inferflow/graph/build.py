"""From a spec and a config to a Graph.

Flows are run once, symbolically: calling a part or primitive adds a node, arithmetic on tensors adds nodes, everything that
does not depend on a tensor is computed now. Shapes are proved as nodes are added; no weight is read.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from ..errors import GraphError, SpecError
from ..spec.document import Leaf, Node, Table, Where
from ..spec.expression import Evaluator, Scope, column_of, show
from ..spec.flow import Assignment, parse_flow
from ..spec.library import Spec
from .absent import absent_keys, explain
from .axes import TOKENS, Axis, Shape, joined
from .flow_evaluator import FlowEvaluator, tensors
from .graph import Graph, Value, Weight
from .graph import Node as GraphNode
from .parts import Part, choose_layer, part_tables, resolve_part, word_list
from .primitives import PRIMITIVES, count
from .scope import BlockScope, ModelScope, axis_factors, literal, resolve_node, settled
from .select import select_rows
from .structure import structure_problems

__all__ = ["Build", "build_graph"]

MAX_LAYERS = 4096
MAX_NODES = 300_000
MAX_STEPS = 100_000  # lines of flows; a large model takes some thousands
MAX_DEPTH = 12
MAX_ELEMENTS = 1 << 26  # of one value, for one token
CALL = 50  # the work of calling a part, or adding a node


@dataclass
class Frame:
    """One flow being run: the names it has assigned, the parts it can call, and where its weights belong."""

    path: str
    scope: Scope
    parts: Mapping[str, Table]
    env: dict[str, Any] = field(default_factory=dict)
    stack: str = ""
    layer: int = -1
    prefix: str = ""
    suffix: str = ""
    depth: int = 0
    outer: Frame | None = None
    used: Where | None = None  # where the outermost block was written


@dataclass(frozen=True)
class Build:
    """A built graph, and the places of the spec that were read for it (for the linter)."""

    graph: Graph
    read: frozenset[Where]


def build_graph(spec: Spec, config: Mapping[str, Any], tensors: Collection[str] = ()) -> Build:
    """The graph of `spec` for `config`. `tensors` are the names in the checkpoint, for ``has('name')``.

    Raises SpecError or GraphError with file, line and column.
    """
    return Builder(spec, config, tensors).run()


class Builder:
    def __init__(self, spec: Spec, config: Mapping[str, Any], tensors: Collection[str]) -> None:
        self.spec = spec
        self.model = ModelScope(spec.tree.table("let"), config, tensors)
        self.values: list[Value] = []
        self.nodes: list[GraphNode] = []
        self.names: dict[str, int] = {}
        self.caches: list[int] = []
        self.flows: dict[int, tuple[Assignment, ...]] = {}
        self.weights: dict[str, Weight] = {}
        self.layers = 0
        self.steps = 0

    def run(self) -> Build:
        for problem in structure_problems(self.spec):
            raise problem
        try:
            return self.build()
        except RecursionError:
            reason, where = "names and blocks lean on one another too deeply", str(self.spec.tree.where)
            raise SpecError(reason, where=where, fix="flatten them") from None
        except SpecError as error:
            explain(error, self.model, self.model.config)
            raise

    def build(self) -> Build:
        model = self.spec.tree.table("model")
        kind = self.spec.value("model", "kind")
        if kind != "causal-lm":
            where = model["kind"].where if "kind" in model else model.where
            raise SpecError(f"model.kind {kind!r} is not served", where=str(where), fix='write kind = "causal-lm"')
        tokens, positions = self.value("tokens", (TOKENS,)), self.value("positions", (TOKENS,))
        self.inputs = {"tokens": tokens, "positions": positions}  # seen from everywhere
        frame = Frame("", self.model, part_tables(self.spec.tree))
        logits = self.flow(self.spec.tree.table("model").get("flow"), frame, model.where)
        if not isinstance(logits, Value) or len(logits.shape) != 2:
            last = self.flows[id(model["flow"])][-1]
            reason = "the model's flow must end in logits [tokens, vocab]"
            raise GraphError(reason, where=str(last.where), fix="end it with logits = output(x)")
        inputs = {name: value.id for name, value in self.inputs.items()}
        graph = Graph(
            self.spec.name, tuple(self.values), tuple(self.nodes), MappingProxyType(inputs), logits.id,
            MappingProxyType(self.names), self.layers, tuple(self.caches),
        )  # fmt: skip
        return Build(select_rows(graph), frozenset(self.model.read))

    # ------------------------------------------------------------------ nodes

    def value(self, name: str, shape: Shape) -> Value:
        made = Value(len(self.values), name, shape)
        self.values.append(made)
        self.names[name] = made.id
        return made

    def emit(
        self, op: str, inputs: list[Value], params: Mapping[str, Any], name: str, weights: tuple[Weight, ...] = ()
    ) -> list[Value]:
        """Add a node, proving its shapes; the new values are called `name`."""
        if len(self.nodes) >= MAX_NODES:
            raise GraphError(f"the graph has more than {MAX_NODES} nodes", fix="check the number of layers")
        self.model.spend(CALL, Where())
        params = {key: settled(value) for key, value in params.items()}
        shapes = PRIMITIVES[op].infer(tuple(v.shape for v in inputs), params)
        for shape in shapes:
            if op != "param" and (size := count(shape)) > MAX_ELEMENTS:
                raise GraphError(
                    f"a value has {size} elements for each token", fix=f"at most {MAX_ELEMENTS} can be held"
                )
        many = len(shapes) > 1
        made = [self.value(f"{name}.{n}" if many else name, shape) for n, shape in enumerate(shapes)]
        if op == "sdpa" or PRIMITIVES[op].state is not None:
            self.caches.append(len(self.nodes))
        scope = name.rpartition(".")[0]
        node = GraphNode(op, tuple(v.id for v in inputs), tuple(v.id for v in made), params, weights, scope)
        self.nodes.append(node)
        return made

    # ------------------------------------------------------------------ flows, stacks, blocks

    def flow(self, node: Node | None, frame: Frame, where: Where) -> Any:
        """Run a flow; the value of the last target of its last line."""
        if node is None:
            raise SpecError("there is no flow", where=str(where), fix='write flow = ["x = f(x)", …]')
        if frame.depth > MAX_DEPTH:
            raise SpecError(
                f"blocks are nested more than {MAX_DEPTH} deep", where=str(where), fix="does a block call itself?"
            )
        lines = self.flows.get(id(node)) or self.flows.setdefault(id(node), parse_flow(node))
        self.steps += len(lines)
        if self.steps > MAX_STEPS:
            raise GraphError(
                f"flows take more than {MAX_STEPS} steps", where=str(where), fix="call fewer blocks in blocks"
            )
        for line in lines:
            self.assign(line, frame)
        return frame.env[lines[-1].targets[-1]]

    def assign(self, line: Assignment, frame: Frame) -> None:
        evaluator = FlowEvaluator(self, frame, line)
        before = len(self.values)
        try:
            value = evaluator.visit(line.value)
        except SpecError as error:
            if not error.where:
                error.where = str(column_of(line.value, line.where, line.text))
                error.reason += f" in '{line.text}'" + (f" of {frame.path}" if frame.path else "")
            raise
        if len(line.targets) == 1:
            values = [value]
        elif isinstance(value, list) and len(value) == len(line.targets):
            values = value
        else:
            got = len(value) if isinstance(value, list) else 1
            reason = f"'{line.text}' assigns {len(line.targets)} names from {got} values"
            raise GraphError(reason, where=str(line.where), fix="name as many as the right side gives")
        for target, item in zip(line.targets, values, strict=True):
            frame.env[target] = item
            if isinstance(item, Value):
                name = f"{frame.path}.{target}" if frame.path else target
                self.names[name] = item.id
                if item.id >= before and item.name.startswith(evaluator.target):
                    frame.env[target] = self.values[item.id] = replace(item, name=name)

    def call_stack(self, name: str, table: Table, args: list[Any], frame: Frame) -> Any:
        count = resolve_node(table["count"], frame.scope)
        if not isinstance(count, int) or isinstance(count, bool) or not 0 < count <= MAX_LAYERS:
            why, fix = absent_keys(table["count"], frame.scope, self.model.config, "int") if count is None else ("", "")
            reason = f"count is {show(count)}" + (f": {why}" if why else "")
            fix = fix or f"a stack has 1 to {MAX_LAYERS} layers"
            raise SpecError(reason, where=str(table["count"].where), fix=fix)
        self.layers += count
        for layer in range(count):
            scope = self.model.at(layer)
            inner = choose_layer(name, table, scope)
            path = f"{name}.{layer}"
            env = self.bind(name, word_list(inner.get("args"), ("x",)), args)
            sub = Frame(path, scope, part_tables(inner), env, name, layer, depth=frame.depth + 1, outer=frame)
            args = [self.flow(inner.get("flow"), sub, table.where), *args[1:]]
            if isinstance(args[0], Value):
                self.names[path] = args[0].id
        return args[0]

    def bind(self, name: str, names: tuple[str, ...], args: list[Any]) -> dict[str, Any]:
        if len(names) != len(args):
            reason = f"'{name}' takes {len(names)} arguments ({', '.join(names)}), it got {len(args)}"
            raise GraphError(reason, fix=f"write {name}({', '.join(names)})")
        return dict(zip(names, args, strict=True))

    def call_part(self, name: str, table: Table, args: list[Any], frame: Frame) -> Any:
        """The value of calling part `name`; an absent part (``if`` is false) gives its argument back."""
        self.model.touch(table.where)
        self.model.spend(CALL, table.where)
        condition = table.get("if")
        if condition is not None and not resolve_node(condition, frame.scope):
            return args[0] if args else None
        part = resolve_part(name, table, frame.scope, self.spec)
        if part.block in PRIMITIVES:
            return self.call_primitive_part(part, args, frame)
        prefix, suffix = (
            literal(part.table.get("prefix"), "prefix") or "",
            literal(part.table.get("suffix"), "suffix") or "",
        )
        block = self.spec.blocks.table(part.block)
        if (
            block.where.file not in self.spec.files
        ):  # the library's blocks use all their parameters, if not for every config
            for node in part.given.values():
                self.model.touch(node.where)
        scope = BlockScope(part.signature, part.given, part.scope_of, self.model_at(frame), part.where)
        path = f"{frame.path}.{name}" if frame.path else name
        names = word_list(block.get("args"), ("x",))
        sub = Frame(
            path, scope, part_tables(block.table("parts")), self.bind(name, names, args), frame.stack,
            frame.layer, frame.prefix + prefix, suffix + frame.suffix, frame.depth + 1, used=frame.used or part.where,
        )  # fmt: skip
        try:
            result = self.flow(block.get("flow"), sub, block.where)
        except SpecError as error:
            self.blame(error, part, block)
            raise
        if isinstance(result, Value):
            self.names[path] = result.id
        return result

    def blame(self, error: SpecError, part: Part, block: Table) -> None:
        """An error in the text of a shipped block is the doing of who uses it; one in a user's own block is there."""
        inside = f"in block '{part.block}' at {error.where}"
        if not part.where.line or not error.where.startswith(f"{block.where.file}:"):
            return
        if block.where.file != self.spec.files[0]:
            error.fix = error.fix if "in block '" in error.fix else f"{error.fix}; {inside}".lstrip("; ")
            error.where = str(part.where)

    def model_at(self, frame: Frame) -> ModelScope:
        scope: Any = frame.scope
        while not isinstance(scope, ModelScope):
            scope = scope.model
        return scope

    def call_primitive_part(self, part: Part, args: list[Any], frame: Frame) -> Value:
        primitive = PRIMITIVES[part.block]
        scope = BlockScope(part.signature, part.given, part.scope_of, self.model_at(frame), part.where)
        params = {key: scope.lookup(key) for key in part.signature}
        for key, parameter in part.signature.items():
            if parameter.type == "axis" and params[key] is not None:
                params[key] = self.axis(part.given.get(key), params[key], part, key)
            if key == "shape" and part.block == "param":
                params[key] = [self.list_axis(n, a, part) for n, a in enumerate(params[key])]
        low, high = primitive.inputs
        values = [a for a in args if a is not None]
        if not low <= len(values) <= high or not all(isinstance(a, Value) for a in values):
            reason = f"'{part.name}' ({part.block}) takes {tensors(low, high)}, it got {len(values)}"
            raise GraphError(reason, fix=primitive.doc)
        role = f"{frame.prefix}{part.name}{frame.suffix}"
        shapes = tuple(v.shape for v in values)
        primitive.infer(shapes, params)  # before the weights' shapes, for the better message
        weights = tuple(
            self.weight(Weight(role, slot, shape, frame.stack, frame.layer, frame.used or part.where), part)
            for slot, shape in primitive.weights(shapes, params)
        )
        name = f"{frame.path}.{part.name}" if frame.path else part.name
        return self.emit(part.block, values, params, name, weights)[0]

    def weight(self, weight: Weight, part: Part) -> Weight:
        known = self.weights.setdefault(weight.key, weight)
        if known.sizes != weight.sizes:
            reason = f"'{weight.role}' is used with two shapes, {known.sizes} and {weight.sizes}"
            raise GraphError(reason, where=str(part.where), fix="give one of the parts a prefix or another name")
        return known

    def axis(self, node: Node | None, size: int, part: Part, key: str) -> Axis:
        """The axis of a size, named by the product it was written as; a parameter's name stands for what it was given."""
        scope = part.scope_of(key)
        while isinstance(scope, BlockScope) and isinstance(node, Leaf) and node.value in scope.signature:
            given = scope.given.get(node.value) or Leaf(scope.signature[node.value].default_text, node.where)
            if not isinstance(given, Leaf) or not isinstance(given.value, str) or not given.value.isidentifier():
                break
            node, scope = given, scope.outer(node.value) if node.value in scope.given else scope.model
        if not isinstance(node, Leaf) or not isinstance(node.value, str):
            return Axis(f"{part.name}.{key}", size)
        text = node.value
        tree = ast.parse(text.strip(), mode="eval").body
        factors = axis_factors(tree, lambda n: Evaluator(scope, node.where, text).visit(n))
        axes = [Axis(name, value) for name, value in factors]
        if len(axes) == 2:
            return joined(axes[0], axes[1])
        return Axis(text.strip(), size)

    def list_axis(self, n: int, size: Any, part: Part) -> Axis:
        node = part.given["shape"]
        item = node.value[n] if isinstance(node, Leaf) and isinstance(node.value, list) else None
        if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
            raise GraphError(
                f"shape of '{part.name}' has {size!r}", where=str(node.where), fix="sizes are positive integers"
            )
        return self.axis(item, size, part, f"shape.{n}")
