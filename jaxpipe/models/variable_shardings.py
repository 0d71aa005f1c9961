"""Partition specs of a model's variables and of the optimizer state.

annotations of the model (nn.with_partitioning, logical axes, nnx metadata), shardings=  ──▶ a spec for each variable
a parameter's spec ──▶ that of its optimizer state; with ZeRO-1 also over the replicas
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from flax.linen import get_logical_axis_rules
from jax.sharding import PartitionSpec as P

from jaxpipe.errors import PartitionError
from jaxpipe.graph.graph import Graph
from jaxpipe.graph.sharding_propagation import Propagated, propagate
from jaxpipe.graph.split_scan import WholeStackError
from jaxpipe.models.bound_model import BoundModel, Variable
from jaxpipe.models.microbatch_program import MicrobatchProgram
from jaxpipe.models.traced_update import TracedUpdate
from jaxpipe.options import AxisRules, PlanOptions
from jaxpipe.sharding.mesh_axes import DATA, REPLICA, Specs, Submesh, axes_by_dimension, axis_names, spec_of


#: Mesh axes over which examples are split, if the caller does not say which.
BATCH_AXES = (REPLICA, "fsdp")


@dataclass(frozen=True, eq=False)
class Shardings:
    """Partition specs of a model's variables in a plan.

    Attributes:
      submesh: the axes over which the programs of a stage are sharded.
      parameters, state: the spec of each variable.
      optimizer: the spec of each leaf of the optimizer state; none if no leaf is split.
      batch_axes: over which the examples of a micro-batch are split.
    """

    submesh: Submesh
    parameters: tuple[P, ...]
    state: tuple[P, ...]
    optimizer: tuple[P, ...]
    batch_axes: tuple[str, ...]
    _propagated: dict[Graph, Propagated] = field(default_factory=dict)

    def propagated(self, objective: MicrobatchProgram) -> Propagated:
        """Return how the arrays of a program of these variables are split."""
        graph = objective.graph
        if graph not in self._propagated:
            given = dict(zip((*objective.parameters, *objective.state), (*self.parameters, *self.state), strict=True))
            given |= {t: self.batch_spec(graph.tensors[t].shape) for t in objective.batch}
            self._propagated[graph] = propagate(graph, given, self.submesh.shape)
        return self._propagated[graph]

    def batch_spec(self, shape: Sequence[int]) -> P:
        """Return the spec of an array of a micro-batch."""
        parts = math.prod(self.submesh.shape[axis] for axis in self.batch_axes)
        return P() if not self.batch_axes or not shape or shape[0] % parts else spec_of([self.batch_axes])

    def specs(self, objective: MicrobatchProgram) -> Specs:
        """Return the specs of the arrays of a program of these variables."""
        return Specs(self.submesh, self.propagated(objective).specs, self.optimizer)


def shardings_of(
    update: TracedUpdate,
    objective: MicrobatchProgram,
    submesh: Submesh,
    replicas: int,
    options: PlanOptions,
) -> Shardings:
    """Return how a plan splits the variables of a model and its optimizer state."""
    parameters, state = variable_specs(objective.model, submesh, options)
    batch_axes = tuple(axis for axis in BATCH_AXES if axis in submesh.shape)
    if options.batch_axes is not None:
        _check_axes("batch_axes", options.batch_axes, submesh.shape)
        batch_axes = (*(axis for axis in batch_axes if axis == REPLICA), *options.batch_axes)
    # The optimizer state is split as its parameters; with ZeRO over the replicas, too.
    model = objective.model
    pieces = zip(model.stacks[0].leaf_of, parameters, (v.aval.shape for v in model.parameters), strict=True)
    of_leaf = {leaf: (spec, shape) for leaf, spec, shape in pieces}
    optimizer = []
    for leaf, aval in zip(update.state_stacks.leaf_of, update.state_avals, strict=True):
        owner, spec = update.owner[leaf], P()
        if owner is not None:
            owned, shape = of_leaf[owner]
            spec = owned if aval.shape[1:] == shape[1:] and len(aval.shape) == len(shape) else P()
            if options.zero and replicas > 1:
                spec = _over_replicas(spec, aval.shape, submesh, replicas)
        optimizer.append(spec)
    split = tuple(optimizer) if any(spec != P() for spec in optimizer) else ()
    shardings = Shardings(submesh, parameters, state, split, batch_axes)
    _check_used(shardings, objective)
    return shardings


def variable_specs(model: BoundModel, submesh: Submesh, options: PlanOptions) -> tuple[tuple[P, ...], tuple[P, ...]]:
    """Return the specs of a model's parameters and of its state.

    Raises:
      WholeStackError: if a dimension is no multiple of the devices over which it is split.
    """
    groups, whole = [], model.original
    rules = options.axis_rules or get_logical_axis_rules()
    _check_patterns(options.shardings, (*whole.parameters, *whole.state), submesh.shape)
    for variables, marks, stacks in zip((whole.parameters, whole.state), whole.annotated, model.stacks, strict=True):
        pairs = zip(variables, marks or (P(),) * len(variables), strict=True)
        specs = [_spec(v, mark, options.shardings, submesh.shape, rules) for v, mark in pairs]
        groups.append(tuple(specs[k] for k in stacks.leaf_of))
    parameters, state = groups
    for variable, spec in zip((*model.parameters, *model.state), (*parameters, *state), strict=True):
        _check_divides(variable, spec, submesh.shape)
    return parameters, state


def check_exchanged(exchanged: bool, submesh: Submesh, options: PlanOptions) -> None:
    """Raise ``PartitionError`` if gradients are exchanged by blocks where parameters or optimizer state are split."""
    if not exchanged or not (submesh.shape or options.zero):
        return
    what = f"PlanOptions(zero={options.zero})" if options.zero else f"the mesh axes {', '.join(submesh.shape)}"
    raise PartitionError(
        f"gradient_exchange=block_sparse(...) with {what}: replicas choose blocks of whole gradients, each for itself. "
        "Leave out one of the two."
    )


def _spec(variable: Variable, annotated: P, given: Mapping[str, P], shape: Mapping[str, int], rules: AxisRules) -> P:
    """Return the spec that is given for a variable, or else over the mesh axes that its annotation means.

    Of an axis in two dimensions, the first counts.
    """
    for pattern, spec in given.items():
        if fnmatchcase(variable.name, pattern):
            return spec
    used: set[str] = set()
    entries = []
    for entry in tuple(annotated):
        axes = tuple(axis for name in axis_names(entry) for axis in _axes(name, used, shape, rules))
        used.update(axes)
        entries.append(axes)
    return spec_of(entries)


def _axes(name: str, used: set[str], shape: Mapping[str, int], rules: AxisRules) -> tuple[str, ...]:
    """Return the mesh axes that a name stands for, by the rules for logical ones, of those that are still free."""
    if name in shape:
        return () if name in used else (name,)
    for logical, target in rules:
        if logical == name:
            axes = tuple(axis for axis in axis_names(target) if axis in shape)
            if target is None or (axes and used.isdisjoint(axes)):
                return axes
    return ()


def _over_replicas(spec: P, shape: Sequence[int], submesh: Submesh, replicas: int) -> P:
    """Split the largest dimension that can be over the replicas, too."""
    entries = list(axes_by_dimension(spec, len(shape)))
    parts = [math.prod(submesh.shape[axis] for axis in axes) for axes in entries]
    fitting = [d for d in range(len(shape)) if shape[d] % (parts[d] * replicas) == 0 and shape[d]]
    if not fitting:
        return spec
    d = max(fitting, key=lambda d: shape[d] // parts[d])
    entries[d] = (*entries[d], DATA)
    return spec_of(entries)


def _check_patterns(given: Mapping[str, P], variables: Sequence[Variable], shape: Mapping[str, int]) -> None:
    for pattern, spec in given.items():
        _check_axes(f"shardings[{pattern!r}]", [axis for entry in tuple(spec) for axis in axis_names(entry)], shape)
        fitting = [v for v in variables if fnmatchcase(v.name, pattern)]
        if not fitting:
            names = ", ".join(v.name for v in variables[:5])
            raise PartitionError(
                f"PlanOptions.shardings: no variable is called {pattern!r}. Names are paths, such as {names}; * stands "
                "for any text."
            )
        for v in fitting:
            if len(spec) > len(v.aval.shape):
                raise PartitionError(
                    f"PlanOptions.shardings[{pattern!r}] is {spec}, for {len(spec)} dimensions, and {v.name} has the "
                    f"shape {v.aval.shape}. Give at most one entry for each dimension."
                )


def _check_axes(what: str, axes: Sequence[str], shape: Mapping[str, int]) -> None:
    unknown = [axis for axis in axes if axis not in shape]
    if unknown:
        known = ", ".join(f"{axis!r} ({size})" for axis, size in shape.items()) or "none"
        raise PartitionError(
            f"PlanOptions.{what} names the mesh axis {unknown[0]!r}. The axes within a stage are {known}: "
            "those of the mesh beside the axes of stages and replicas. Use one of these, or make the mesh with it."
        )


def _check_divides(variable: Variable, spec: P, shape: Mapping[str, int]) -> None:
    sizes = variable.aval.shape
    for size, axes in zip(sizes, axes_by_dimension(spec, len(sizes)), strict=True):
        parts = math.prod(shape[axis] for axis in axes)
        if size % parts:
            what = f"{variable.name} {variable.aval.shape} is split over the mesh axes {', '.join(axes)}"
            raise WholeStackError(
                f"Variable {what}, and its dimension of {size} is no multiple of {parts}. Change it, or pass "
                f"another spec: PlanOptions(shardings={{{variable.name!r}: ...}}).",
                what,
            )


def _check_used(shardings: Shardings, objective: MicrobatchProgram) -> None:
    """Raise ``PartitionError`` if devices along an axis would all do the same."""
    used = {axis for axes in shardings.propagated(objective).products.values() for axis in axes}
    used.update(axis for axis, _ in objective.annotations.mapped)
    idle = [axis for axis, size in shardings.submesh.shape.items() if size > 1 and axis not in used]
    if idle:
        size = shardings.submesh.shape[idle[0]]
        raise PartitionError(
            f"The mesh has an axis {idle[0]!r} of {size} devices, over which nothing is split, so that these would all "
            "do the same. A stage is sharded by the model's own annotations (nn.with_partitioning, logical axes, nnx "
            "metadata, sharding constraints), by PlanOptions(shardings={name: spec}), or, for examples, by "
            f"PlanOptions(batch_axes=({idle[0]!r},)). For more stages or replicas use the axes 'stage' and 'data'."
        )
