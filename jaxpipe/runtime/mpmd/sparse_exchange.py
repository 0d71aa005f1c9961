"""The block-sparse exchange of gradients between the replicas of each stage, before the optimizer.

sums of gradients, residuals ──one program──▶ messages, new residuals ──another──▶ averages
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpipe.array_types import Array
from jaxpipe.runtime.mpmd.stage_layout import StageLayout
from jaxpipe.runtime.mpmd.step_graph import Arrays
from jaxpipe.runtime.mpmd.step_writer import StepEndWriter, put
from jaxpipe.runtime.mpmd.update_tasks import StageUpdate
from jaxpipe.runtime.replica_exchange import StageExchange, sums_in_order
from jaxpipe.schedules.table import StageNumber
from jaxpipe.sharding.mesh_axes import DATA


def exchange_gradients(writer: StepEndWriter, plan: StageExchange) -> None:
    """Give every stage the averages of its gradients, and new residuals.

    Averages are made by another program than the messages, so that they take the memory of the gradients.
    """
    layout = writer.layout
    for s in layout.stages:
        writer.renew(s, "exchange", functools.partial(_exchange, layout, writer.ends[s], plan, s))
        put(writer.held[s], writer.run_whole(s, "averages", functools.partial(_averages, layout, plan, s)))


def _exchange(layout: StageLayout, end: StageUpdate, plan: StageExchange, s: StageNumber, arrays: Arrays) -> Arrays:
    """Make messages and new residuals of residuals and gradients."""
    held, members = layout.held(s), layout.members(s)
    avals, arriving = [layout.aval(t) for t in held], jax.tree.leaves(plan.messages(s))

    def of_member(shares: list[Array], before: list[Array], step: Array, stopped: Array | bool) -> list[Array]:
        own_shares, left = ([x.reshape(a.shape) for x, a in zip(xs, avals, strict=True)] for xs in (shares, before))
        gradients = [g.astype(x.dtype) + x for g, x in zip(own_shares, left, strict=True)]
        arrived, (rest, squares, unsent) = plan.send(s, step, gradients)
        new = [x.reshape(old.shape) for x, old in zip(rest, before, strict=True)]
        if layout.is_guarded:
            new = [jnp.where(stopped, old, x) for old, x in zip(before, new, strict=True)]
        return [*jax.tree.leaves(arrived), *new, *sums_in_order([squares, unsent], DATA)]

    share = arrays["weight"] / members
    shares = [g / share.astype(g.dtype) for g in end.own_sums(arrays)]
    mapped = jax.shard_map(
        of_member,
        mesh=layout.specs.submesh.abstract(members),
        in_specs=(P(DATA), P(DATA), P(), P()),
        out_specs=[*(P() for _ in arriving), *(P(DATA) for _ in avals), P(), P()],
        check_vma=False,
    )
    before = [arrays["residual"][t] for t in held]
    *results, had, unsent = mapped(shares, before, arrays["step"], arrays.get("stopped", False))
    residual = dict(zip(held, results[len(arriving) :], strict=True))
    return {"messages": results[: len(arriving)], "residual": residual, "had": had, "unsent": unsent}


def _averages(layout: StageLayout, plan: StageExchange, s: StageNumber, arrays: Arrays) -> Arrays:
    """Return the averages of the gradients, of the messages of their exchange."""
    messages = jax.tree.unflatten(jax.tree.structure(plan.messages(s)), arrays["messages"])
    return {"averages": dict(zip(layout.held(s), plan.averages(s, arrays["step"], messages), strict=True))}
