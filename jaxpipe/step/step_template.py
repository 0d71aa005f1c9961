"""A step that is traced once: its decorated programs are equations, in whose place any storage may be put.

    step ──trace──▶ ... forward(inputs) ... backward(inputs, cotangents) ...
                              │                    ▲
                              ▼   what is kept     │         for each level: the equations of some passes here
                        equations ────────▶ equations

The backward equation names the inputs of the forward one; what is kept between them is left open. To run a user's
function and Flax anew for each level would take most of the time of planning.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.extend.core import ClosedJaxpr, Primitive

from jaxpipe import _compat
from jaxpipe.array_types import AbstractArray, AnyJaxpr, Array, Equation, PyTree
from jaxpipe.graph.evaluate_otherwise import evaluate_otherwise, with_programs
from jaxpipe.graph.graph import equations_in, without_literals
from jaxpipe.models.purify_nnx import is_module
from jaxpipe.residuals.chosen_storage import Choices, DecoratedProgram, Passes, Storage, choosing
from jaxpipe.residuals.vjp_program import reached
from jaxpipe.step.step_arguments import Call, flat_arguments, split_static, with_static


#: The two equations.
FORWARD, BACKWARD = Primitive("jaxpipe_forward"), Primitive("jaxpipe_backward")
FORWARD.multiple_results = BACKWARD.multiple_results = True


class CannotReplaceError(Exception):
    """A step in which decorated programs are no equations to be replaced: it is traced anew for other storage."""


@dataclass(frozen=True, eq=False)
class OpaquePasses:
    """The equations of a program."""

    program: DecoratedProgram

    def forward(self, values: Sequence[Array]) -> tuple[Sequence[Array], Sequence[Array]]:
        """Return outputs and, to be kept, the inputs."""
        if any(op.has_effects for op in self.program.graph.operators) or _compat.is_in_shard_map():
            raise CannotReplaceError
        return FORWARD.bind(*values, program=self.program), values

    def backward(self, kept: Sequence[Array], cotangents: Sequence[Array | None]) -> list[Array | None]:
        """Return gradients."""
        program, given = self.program, tuple(ct is not None for ct in cotangents)
        present = [ct for ct in cotangents if ct is not None]
        results = BACKWARD.bind(*kept, *present, program=program, given=given) if present else []
        gradients = dict(zip(has_gradient(program, given), results, strict=False))
        return [gradients.get(t) for t in program.wrt]


def has_gradient(program: DecoratedProgram, given: Sequence[bool]) -> list[int]:
    """Return those of a program's ``wrt`` whose gradient is not zero where some cotangents are given."""
    some = reached(program.default, [t for t, flag in zip(program.graph.outputs, given, strict=True) if flag])
    return [t for t in program.wrt if t in some]


@FORWARD.def_abstract_eval
def _output_types(*_: AbstractArray, program: DecoratedProgram) -> list[AbstractArray]:
    return [program.graph.tensors[t].aval for t in program.graph.outputs]


@BACKWARD.def_abstract_eval
def _gradient_types(*_: AbstractArray, program: DecoratedProgram, given: tuple[bool, ...]) -> list[AbstractArray]:
    return [program.graph.tensors[t].aval for t in has_gradient(program, given)]


@dataclass(frozen=True, eq=False)
class StepTemplate:
    """A traced step of flat arguments: leaves of trees and of the states of NNX modules, and likewise its results.

    Attributes:
      call: the step and its arguments.
      program: the traced step.
      results: the structure of what it returns.
    """

    call: Call
    program: ClosedJaxpr
    results: Any

    def with_storage(self, storage: Storage) -> Callable[..., PyTree]:
        """Return the step as a function of its own arguments, whose decorated programs run as a storage says."""
        call, count = self.call, self.results.num_leaves

        @functools.wraps(call.step)
        def step(*args: PyTree, **kwargs: PyTree) -> PyTree:
            flat = flat_arguments(split_static(call.step, call.options, args, kwargs)[1])
            outputs = _evaluated(self.program, storage, flat.values)
            if flat.modules:
                nnx.update(flat.modules, jax.tree.unflatten(jax.tree.structure(flat.state), outputs[count:]))
            return jax.tree.unflatten(self.results, outputs[:count])

        return step


def step_template(call: Call, met: dict[str, DecoratedProgram]) -> StepTemplate | None:
    """Trace a step with its decorated programs as equations; None where they cannot be replaced by others.

    They are noted in ``met``. None: where a program is batched or in a ``shard_map``, where its passes are in different
    loops or functions under ``jit``, and where a step adds to its modules or returns them.
    """
    static, dynamic = split_static(call.step, call.options, call.args, call.kwargs)
    flat = flat_arguments(dynamic)
    structure = None

    def step(*values: Array) -> list[Array]:
        nonlocal structure
        others, modules = flat.filled(values)
        args, kwargs = with_static(static, others)
        results, structure = jax.tree.flatten(call.step(*args, **kwargs), is_leaf=is_module)
        graphdef, state = nnx.split(modules, graph=True)
        if graphdef != flat.graphdef or any(map(is_module, results)):
            raise CannotReplaceError
        return [*results, *jax.tree.leaves(state)]

    try:
        # Both equations take the same keys; JAX checks these where the step is traced with its storage.
        with choosing(Choices(OpaquePasses, met=met)), jax.debug_key_reuse(False):
            program = jax.jit(step).trace(*flat.values).jaxpr
        _check_pairs(program)
    except (CannotReplaceError, NotImplementedError):  # of which the latter says that there is no rule for a batch
        return None
    assert structure is not None
    return StepTemplate(call, program, structure)


def _check_pairs(program: Any) -> None:
    """Raise ``CannotReplaceError`` unless each backward equation has its forward equation before it."""
    seen = set()
    for equation in _compat.open_jaxpr(program)[0].eqns:
        if equation.primitive is FORWARD:
            seen.add(_pair(equation))
        elif equation.primitive is BACKWARD and _pair(equation) not in seen:
            raise CannotReplaceError
        for inner in _compat.inner_programs(equation):
            _check_pairs(inner)


def _pair(equation: Equation) -> tuple[object, ...]:
    """Return the program and its inputs, which a forward and a backward equation share."""
    program = equation.params["program"]
    inputs = equation.invars[: len(program.graph.inputs)]
    return program, *(repr(atom) if _compat.is_literal(atom) else id(atom) for atom in inputs)


def _evaluated(program: AnyJaxpr, storage: Storage, values: Sequence[Array]) -> list[Array]:
    """Return the results of a program for some values, with passes run in place of opaque equations."""
    kept: dict[tuple[object, ...], tuple[Passes, Any]] = {}

    def apply(equation: Equation, operands: Sequence[Array]) -> Sequence[Array]:
        params = equation.params
        if equation.primitive is FORWARD:
            passes = storage(params["program"])
            results, stash = passes.forward(operands)
            kept[_pair(equation)] = passes, stash
            return results
        if equation.primitive is BACKWARD:
            return _gradients(*kept[_pair(equation)], params, operands)
        inner = {name: with_programs(value, replaced) for name, value in params.items()}
        return _compat.evaluate_equation(equation.replace(params=inner), without_literals(equation, operands))

    def replaced(inner: AnyJaxpr) -> AnyJaxpr:
        opened, _ = _compat.open_jaxpr(inner)
        if all(x.primitive is not FORWARD for x in equations_in(opened.eqns)):
            return inner
        avals = [atom.aval for atom in opened.invars]
        return jax.make_jaxpr(lambda *values: _evaluated(inner, storage, values))(*avals)

    return evaluate_otherwise(program, values, apply)


def _gradients(passes: Passes, stash: Any, params: Mapping[str, Any], operands: Sequence[Array]) -> list[Array]:
    """Return the results of a backward equation, of what is kept and of the cotangents that are given."""
    program, given = params["program"], params["given"]
    rest = iter(operands[len(program.graph.inputs) :])
    gradients = passes.backward(stash, [next(rest) if flag else None for flag in given])
    by_input = dict(zip(program.wrt, gradients, strict=True))
    return [by_input[t] for t in has_gradient(program, given)]
