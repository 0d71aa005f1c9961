"""The passes of a decorated program as two equations of a traced step, to be replaced before the step is compiled.

    outputs   = jaxpipe_forward[program](inputs)
    gradients = jaxpipe_backward[program, given](inputs, cotangents)

What is kept between them is left open: the backward equation names the inputs of the forward one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend.core import Primitive

from jaxpipe import _compat
from jaxpipe.array_types import AbstractArray, Array
from jaxpipe.residuals.chosen_storage import DecoratedProgram
from jaxpipe.residuals.vjp_program import reached


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
    seeds = [t for t, flag in zip(program.graph.outputs, given, strict=True) if flag]
    some = reached(program.default, seeds)
    return [t for t in program.wrt if t in some]


@FORWARD.def_abstract_eval
def _outputs(*_: AbstractArray, program: DecoratedProgram) -> list[AbstractArray]:
    return [program.graph.tensors[t].aval for t in program.graph.outputs]


@BACKWARD.def_abstract_eval
def _gradients(*_: AbstractArray, program: DecoratedProgram, given: tuple[bool, ...]) -> list[AbstractArray]:
    return [program.graph.tensors[t].aval for t in has_gradient(program, given)]
