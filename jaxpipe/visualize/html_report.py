"""A plan as one HTML page: tables and pictures in one file, for people; the plan as JSON in it, for machines."""

import base64
import html
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxpipe.errors import PartitionError
from jaxpipe.graph.allowed_codecs import parse
from jaxpipe.plan import Plan
from jaxpipe.planning.cuts.placed_stages import Partition
from jaxpipe.planning.memory_report import MemoryReport
from jaxpipe.runtime.stages import Program, with_backward
from jaxpipe.runtime.uint32_words import word_count
from jaxpipe.schedules import Timeline
from jaxpipe.schedules.swap_points import HOST
from jaxpipe.text.printed import PlainTable, html_table, html_text
from jaxpipe.text.units import bytes_text, seconds_text
from jaxpipe.visualize.pictures import draw_memory, draw_stages, draw_timeline, load_figure_class


if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The browser may load nothing and run nothing; pictures and styles are in the page.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #d0d7de; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .6rem 0; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid #e4e8ec; text-align: left; vertical-align: top; }
.right { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.caption { color: #57606a; font-size: .9rem; }
img { width: 100%; min-width: 44rem; height: auto; display: block; margin: .8rem 0; }
"""


def check_path(path: str | os.PathLike[str]) -> None:
    """Raise an error unless a page can be written to a file, as far as its name says.

    Raises:
      PartitionError: if the file is called otherwise.
      FileNotFoundError, IsADirectoryError: if its folder is missing, or it is one.
    """
    file = Path(path)
    if file.suffix.lower() not in ("", ".html", ".htm"):
        raise PartitionError(f"report writes HTML, and path={str(path)!r} ends with {file.suffix!r}. Use '.html'.")
    if file.is_dir():
        raise IsADirectoryError(f"path={str(path)!r} is a folder. Name a file in it: {str(file / 'report.html')!r}.")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"path={str(path)!r}: there is no folder {str(file.parent)!r}. Make it first.")


def page(
    plan: Plan,
    partition: Partition,
    program: Program,
    timelines: Mapping[str, Timeline],
    memory: MemoryReport | None = None,
) -> str:
    """Return a page as HTML. All texts are escaped; the plan is in ``<script id="plan" type="application/json">``.

    Args:
      plan: whose numbers are in all tables and pictures.
      partition: its stages, as ``Pipeline.partition`` gives them.
      program: the program that was planned.
      timelines: the plan's own, whose name is empty, and others by where their seconds come from.
      memory: what XLA reserves, if the step was compiled.
    """
    load_figure_class("A plan's page")
    from matplotlib import rc_context

    schedule, plain_bytes = program.schedule, plain_stash_bytes(program)

    with rc_context({"text.parse_math": False, "svg.hashsalt": "jaxpipe"}):
        body = [
            "<h2>Plan</h2>",
            plan._repr_html_(),
            _picture(draw_stages(partition), "compute and communication of each stage"),
            "<h2>Timeline</h2>",
        ]
        for source, timeline in timelines.items():
            name = source or f"predicted from the {plan.profile} profile"
            body.append(f"<h3>{html.escape(name)}</h3>")
            body.append(_picture(draw_timeline(plan, schedule, timeline, source=source), f"timeline, {name}"))
        body += [
            "<h2>Memory</h2>",
            f"<p>{html_text(_memory_text(plan, memory))}</p>",
            _picture(draw_memory(plan, schedule, memory), "bytes by component, and stashes over time"),
        ]
    body.append("<h2>What each method saves</h2>")
    methods = _methods(plan, plain_bytes, partition.network.is_uniform)
    body += [html_table(_stash_table(plan, plain_bytes)), html_table(methods)]
    if plan.search:
        body += ["<h2>How the plan was found</h2>", f"<p>{html_text(chr(10).join(plan.search))}</p>"]
    title = f"jaxpipe: {len(plan.stages)} stages, {plan.num_microbatches} micro-batches, {plan.schedule}"
    # "<" cannot end the element that it stands in; JSON reads the escape as the same character.
    data = plan.to_json().replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{html_text(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{html_text(title)}</h1>
{chr(10).join(body)}
<script id="plan" type="application/json">
{data}
</script>
</body>
</html>
"""


def _picture(figure: "Figure", name: str) -> str:
    """A figure as an image inside the page; as an image, its SVG cannot clash with others, load or run anything."""
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", bbox_inches="tight", metadata={"Date": None})
    data = base64.b64encode(stream.getvalue()).decode()
    return f'<div class="wide"><img alt="{html.escape(name)}" src="data:image/svg+xml;base64,{data}"></div>'


def _memory_text(plan: Plan, memory: MemoryReport | None) -> str:
    """Return a sentence with the bytes that XLA reserves and those predicted, if the step was compiled."""
    if memory is None:
        return "The step was not compiled: all bytes are predicted."
    compiled, temporary = max(memory.compiled_bytes), max(memory.temporary_bytes)
    ratio = plan.predicted_bytes / compiled if compiled else 1.0
    return (
        f"XLA reserves {bytes_text(compiled)} {plan.where} (predicted: {ratio:.1%} of it), among them "
        f"{bytes_text(temporary)} of temporaries."
    )


def plain_stash_bytes(program: Program) -> tuple[int, ...]:
    """By stage, what ``jax.grad`` keeps of one micro-batch: decorations and the plan's storage are not looked at."""
    stages = []
    for stage in program.stages:
        operators = tuple(replace(op, policy=None) for op in stage.graph.operators)
        stages.append(replace(stage, graph=replace(stage.graph, operators=operators)))
    plain = with_backward(program.objective, stages, parse(()))
    return tuple(sum(4 * word_count(a) for a in stage.stash_avals) for stage in plain)


def _stash_table(plan: Plan, plain_bytes: Sequence[int]) -> PlainTable:
    """Return the table of the bytes that each stage keeps, against plain ``jax.grad``."""
    table = PlainTable("stage", title="Kept of one micro-batch for the backward pass")
    table.add_numbers("plain jax.grad", "kept", "times less", "in flight", "of them away")
    table.add_column("stored as")
    table.add_numbers("time added")
    for k, (stage, plain) in enumerate(zip(plan.stages, plain_bytes, strict=True)):
        table.add_row(
            str(k),
            bytes_text(plain),
            bytes_text(stage.stash_bytes),
            f"{plain / stage.stash_bytes:.1f}" if stage.stash_bytes else "",
            str(stage.in_flight),
            str(stage.away),
            ", ".join(f"{name} {bytes_text(size)}" for name, size in stage.stored.items()),
            seconds_text(stage.added_seconds) if stage.added_seconds else "",
        )
    return table


def _methods(plan: Plan, plain_bytes: Sequence[int], uniform: bool) -> PlainTable:
    """One line for each method; those that are not in use say so. ``uniform`` are links that are all alike."""
    table = PlainTable("method", "what it does here")
    plain, kept = sum(plain_bytes), sum(stage.stash_bytes for stage in plan.stages)
    ratio = f", {plain / kept:.1f} times less" if kept else ""
    table.add_row("encoding", f"a micro-batch keeps {bytes_text(kept)} in place of {bytes_text(plain)}{ratio}")
    added = sum(stage.added_seconds for stage in plan.stages)
    work = sum(stage.forward_seconds + stage.backward_seconds for stage in plan.stages)
    text = "not needed: the default storage keeps the budget" if plan.budget is not None else "no budget was given"
    if any(stage.storage != "default" for stage in plan.stages):
        share = f" ({added / work:.1%} of it)" if work else ""
        again = sum(len(stage.recomputed) for stage in plan.stages)
        text = f"{again} operators run again; with codecs that adds {seconds_text(added)} to a micro-batch{share}"
    table.add_row("recomputation", text)
    pieces = [(piece.stage, piece.bytes * stage.away) for stage in plan.stages for piece in stage.pieces]
    offloaded = [size for target, size in pieces if target != HOST]
    text = f"peers keep {bytes_text(sum(offloaded))} of stashes at most" if offloaded else "no stash goes to a peer"
    table.add_row("swaps to peers", text)
    if plan.host is not None:
        moved = sum(size for target, size in pieces if target == HOST)
        text = f"it keeps {bytes_text(moved)} of stashes at most" if moved else "no stash goes there"
        table.add_row("swaps to the host's memory", plan.host.refused or text)
    text = "gradients are exchanged whole" if plan.replicas > 1 else "one replica: nothing is exchanged"
    if plan.exchange_bytes is not None:
        dense = plan.memory.get("parameters", 0)  # gradients are as large
        text = f"{bytes_text(plan.exchange_bytes)} of {bytes_text(dense)} sent in a step"
    table.add_row(plan.exchange_name, text)
    text = "first cuts kept"
    if len(plan.rounds) > 1:
        first, last = plan.rounds[0].step_seconds, plan.step_seconds
        text = f"{len(plan.rounds)} rounds: step {seconds_text(first)} at first, {seconds_text(last)} in the plan"
    table.add_row("balance", text)
    bound, links = plan.lower_bound_seconds, "links all alike" if uniform else "links that differ"
    ratio = f", {plan.step_seconds / bound:.3f} of the lower bound {seconds_text(bound)}" if bound else ""
    table.add_row("placement", f"a step of {seconds_text(plan.step_seconds)}{ratio}, on {links}")
    return table
