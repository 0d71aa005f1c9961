"""The passes of a decorated program: with a stash between them, or as JAX differentiates it, with checkpoints.

``jax.checkpoint`` around blocks of a program does what ``nn.remat`` does where a model's author writes it, so that a
budget is never worse than that.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxpipe import _compat
from jaxpipe.array_types import AnyJaxpr, Array, Atom, OpenJaxpr
from jaxpipe.graph.graph import encoded_policy, replaced
from jaxpipe.graph.save_policy import SavePolicy
from jaxpipe.residuals.chosen_storage import DecoratedProgram
from jaxpipe.residuals.equal_blocks import modules_by_family
from jaxpipe.residuals.residual_labels import labels
from jaxpipe.residuals.vjp_program import VJPProgram, backward, forward


#: Values of parameters, and the parts of each stored tensor.
Kept = tuple[Sequence[Array], Sequence[Sequence[Array]]]


@dataclass(frozen=True, eq=False)
class StoredPasses:
    """Forward and backward program of a storage plan.

    Attributes:
      vjp: the programs.
      barriers: steps run behind barriers, where XLA needs them: a budget says what is stored.
      labelled: whether stored arrays carry labels that say why.
    """

    vjp: VJPProgram
    barriers: bool = False
    labelled: bool = False

    def forward(self, values: Sequence[Array]) -> tuple[Sequence[Array], Kept]:
        """Return outputs, and parameters and stash."""
        vjp, by_input = self.vjp, dict(zip(self.vjp.graph.inputs, values, strict=True))
        outputs, stash = forward(vjp, values)
        if self.labelled:
            label = labels(vjp)
            stash = [
                parts if t in by_input else tuple(checkpoint_name(x, label(t, k)) for k, x in enumerate(parts))
                for t, parts in zip(vjp.plan.stored, stash, strict=True)
            ]
        return outputs, ([by_input[t] for t in vjp.parameters], stash)

    def backward(self, kept: Kept, cotangents: Sequence[Array | None]) -> list[Array | None]:
        """Return gradients."""
        mapped = any(isinstance(x, _compat.BatchTracer) for x in jax.tree.leaves((kept, cotangents)))
        return backward(self.vjp, *kept, cotangents, barriers=self.barriers and not mapped)


@dataclass(frozen=True, eq=False)
class CheckpointedPasses:
    """A program, the ranges of its equations that are checkpointed, and JAX's policy of what they save."""

    program: DecoratedProgram
    blocks: Sequence[tuple[int, int]]
    policy: SavePolicy

    def forward(self, values: Sequence[Array]) -> tuple[Sequence[Array], Callable[..., Any]]:
        """Return outputs, and their VJP, which is a tree of arrays."""
        places = [self.program.graph.inputs.index(t) for t in self.program.wrt]

        def run(*moving: Array) -> list[Array]:
            return self._checkpointed(replaced(values, places, moving))

        return jax.vjp(run, *(values[k] for k in places))

    def backward(self, kept: Callable[..., Any], cotangents: Sequence[Array | None]) -> list[Array]:
        """Return gradients."""
        avals = [self.program.graph.tensors[t].aval for t in self.program.graph.outputs]
        given = [_zero(aval) if ct is None else ct for ct, aval in zip(cotangents, avals, strict=True)]
        return list(kept(given))

    def _checkpointed(self, values: Sequence[Array]) -> list[Array]:
        jaxpr, consts = _compat.open_jaxpr(self.program.jaxpr)
        env = dict[Atom, Array](zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))
        for start, stop in pairwise(sorted({0, len(jaxpr.eqns), *(place for block in self.blocks for place in block)})):
            piece, inputs, outputs = _section(jaxpr, start, stop)

            def run(*values: Array, piece: Any = piece) -> list[Array]:
                return _compat.evaluate_jaxpr(piece, *values)

            if (start, stop) in self.blocks:
                run = jax.checkpoint(run, policy=self.policy)
            env.update(zip(outputs, run(*(env[v] for v in inputs)), strict=True))
        return [jnp.asarray(v.val) if _compat.is_literal(v) else env[v] for v in jaxpr.outvars]


def checkpointed_blocks(program: DecoratedProgram, family: str | None, every: int) -> list[tuple[int, int]] | None:
    """Return the ranges of equations of every n-th module of a family, or of the whole program without one.

    None if no such ranges are apart from each other, if decorated functions are within the program, or if it has a save
    policy of its own, or side effects, which JAX would run again.
    """
    equations, operators = _compat.open_jaxpr(program.jaxpr)[0].eqns, program.graph.operators
    keeps = program.policy.saves is not None or any(op.has_effects for op in operators)
    if keeps or any(encoded_policy(equation) is not None for equation in equations):
        return None
    if family is None:
        return [(0, len(equations))]
    ranges = _ranges(modules_by_family(map(_compat.named_scope_of, equations)).get(family, {}))
    return None if ranges is None else ranges[::every]


def _ranges(modules: Mapping[str, Sequence[int]]) -> list[tuple[int, int]] | None:
    """Return the range of places of each module; None without modules, or if ranges overlap."""
    ranges = [(min(places), max(places) + 1) for places in modules.values()]
    apart = all(stop <= start for (_, stop), (start, _) in pairwise(ranges))
    return ranges if ranges and apart else None


def _section(jaxpr: OpenJaxpr, start: int, stop: int) -> tuple[AnyJaxpr, list[Atom], list[Atom]]:
    """Return some equations of a program as a program, its inputs, and its outputs: those that others read."""
    equations = jaxpr.eqns[start:stop]
    written = dict.fromkeys(v for equation in equations for v in equation.outvars)
    read = [v for equation in equations for v in equation.invars if not _compat.is_literal(v) and v not in written]
    later = {v for equation in jaxpr.eqns[stop:] for v in equation.invars if not _compat.is_literal(v)}
    later.update(v for v in jaxpr.outvars if not _compat.is_literal(v))
    inputs, outputs = list(dict.fromkeys(read)), [v for v in written if v in later]
    return _compat.rebuilt(jaxpr, (), (), inputs, equations, outputs), inputs, outputs


def _zero(aval: Any) -> Any:
    """Return the cotangent of an output that is not differentiated."""
    if jax.dtypes.issubdtype(aval.dtype, np.inexact):
        return _compat.zeros(aval)
    return np.zeros(aval.shape, jax.dtypes.float0)
