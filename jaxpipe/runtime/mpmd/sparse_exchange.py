"""The block-sparse exchange of gradients between the replicas of each stage, before the optimizer.

sums of gradients, residuals ──one program──▶ messages, new residuals ──another──▶ averages
"""

import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpipe.array_types import Array
from jaxpipe.runtime.mpmd.microbatch_graph import put
from jaxpipe.runtime.mpmd.step_end_graph import StepEndWriter
from jaxpipe.runtime.mpmd.trace_task import Arrays, TaskWork
from jaxpipe.runtime.replica_exchange import StageExchange
from jaxpipe.schedules.table import StageNumber
from jaxpipe.sharding.mesh_axes import DATA


def exchange_gradients(writer: StepEndWriter, plan: StageExchange) -> None:
    """Give every stage the averages of its gradients, and new residuals.

    Averages are made by another program than the messages, so that they take the memory of the gradients.
    """
    context = writer.context
    for s in writer.layout.stages:
        members, place = context.members[s], writer.place(s)
        for t in context.held(s):
            aval, lead = context.aval(t), (members,) if members > 1 else ()
            wide = jax.ShapeDtypeStruct((*lead, *aval.shape), jnp.promote_types(aval.dtype, jnp.float32))
            put(
                writer.held[s],
                {"residual": {t: writer.given(place, "residual", t, wide, writer.ends[s].form(("residual", t)))}},
            )
    for s in writer.layout.stages:
        writer.renew(s, _exchange(writer, plan, s))
        put(writer.held[s], writer.run_whole(s, _averages(writer, plan, s), writer.arrays_of(s)))


def _exchange(writer: StepEndWriter, plan: StageExchange, s: StageNumber) -> TaskWork:
    """Return the work by which residuals and gradients become messages and new residuals."""
    context, end, guarded = writer.context, writer.ends[s], writer.update.guarded
    held, members = context.held(s), context.members[s]
    avals, arriving = [context.aval(t) for t in held], jax.tree.leaves(plan.messages(s))

    def of_member(shares: list[Array], before: list[Array], step: Array, stopped: Array | bool) -> list[Array]:
        own_shares, left = ([x.reshape(a.shape) for x, a in zip(xs, avals, strict=True)] for xs in (shares, before))
        gradients = [g.astype(x.dtype) + x for g, x in zip(own_shares, left, strict=True)]
        arrived, (rest, squares, unsent) = plan.send(s, step, gradients)
        new = [x.reshape(old.shape) for x, old in zip(rest, before, strict=True)]
        if guarded:
            new = [jnp.where(stopped, old, x) for old, x in zip(before, new, strict=True)]
        return [*jax.tree.leaves(arrived), *new, *_in_order([squares, unsent])]

    def function(arrays: Arrays) -> Arrays:
        share = arrays["weight"] / members
        shares = [g / share.astype(g.dtype) for g in end.own_sums(arrays)]
        mapped = jax.shard_map(
            of_member,
            mesh=context.specs.submesh.abstract(members),
            in_specs=(P(DATA), P(DATA), P(), P()),
            out_specs=[*(P() for _ in arriving), *(P(DATA) for _ in avals), P(), P()],
            check_vma=False,
        )
        before = [arrays["residual"][t] for t in held]
        *results, had, unsent = mapped(shares, before, arrays["step"], arrays.get("stopped", False))
        residual = dict(zip(held, results[len(arriving) :], strict=True))
        return {"messages": results[: len(arriving)], "residual": residual, "had": had, "unsent": unsent}

    return end.work("exchange", function)


def _averages(writer: StepEndWriter, plan: StageExchange, s: StageNumber) -> TaskWork:
    """Return the averages of the gradients, of the messages of their exchange."""
    tree, held = jax.tree.structure(plan.messages(s)), writer.context.held(s)

    def function(arrays: Arrays) -> Arrays:
        averages = plan.averages(s, arrays["step"], jax.tree.unflatten(tree, arrays["messages"]))
        return {"averages": dict(zip(held, averages, strict=True))}

    return writer.ends[s].work("averages", function)


def _in_order(values: Sequence[Array]) -> list[Array]:
    rows = [lax.all_gather(x, DATA) for x in values]
    return [functools.reduce(operator.add, [row[r] for r in range(row.shape[0])]) for row in rows]
