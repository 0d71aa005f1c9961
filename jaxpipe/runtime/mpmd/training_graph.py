"""The graphs of a pipeline: a training step, its gradient, and forward passes."""

import functools

from jaxpipe.runtime.mpmd.early_updates import EarlyUpdateWriter
from jaxpipe.runtime.mpmd.report_tasks import stacked_predictions
from jaxpipe.runtime.mpmd.sparse_exchange import exchange_gradients
from jaxpipe.runtime.mpmd.stage_layout import StageLayout
from jaxpipe.runtime.mpmd.step_graph import Port, StepGraph
from jaxpipe.runtime.mpmd.step_writer import MicrobatchWriter, StepEndWriter


def training_graph(layout: StageLayout) -> StepGraph:
    """Return the graph of a training step.

    Its outputs are the state after it, in the fields of ``TrainState``, and reports at ``layout.home``.
    """
    early = layout.schedule.versions is not None
    writer = EarlyUpdateWriter(layout) if early else StepEndWriter(layout)
    writer.run_table()
    writer.fold_state()
    if not early:
        writer.return_gradients()
    writer.report_step()
    if layout.update.exchange is not None:
        exchange_gradients(writer, layout.update.exchange)
    writer.update_stages()
    return writer.finish(writer.state())


def gradient_graph(layout: StageLayout) -> StepGraph:
    """Return the graph for loss, metrics and gradients, which are in the field ``gradients`` of their stages."""
    writer, outputs = StepEndWriter(layout), {}
    writer.run_table()
    writer.report()
    writer.return_gradients()
    for s in layout.stages:
        means = writer.run_whole(s, "gradient", writer.ends[s].mean_gradient)["mean"]
        outputs |= {Port(writer.place(s), "gradients", t): number for t, number in means.items()}
    return writer.finish(outputs)


def evaluation_graph(layout: StageLayout) -> StepGraph:
    """Return the graph for loss and metrics of a forward pass."""
    writer = MicrobatchWriter(layout)
    writer.run_table()
    writer.report()
    return writer.finish({})


def prediction_graph(layout: StageLayout) -> StepGraph:
    """Return the graph for predictions, in the field ``predictions`` of a member of the last stage for each replica."""
    writer, outputs = MicrobatchWriter(layout), {}
    writer.run_table()
    for r in layout.replicas:
        place = writer.worker(layout.home.stage, r, 0)
        microbatches = range(layout.num_microbatches)
        rows = [[writer.results[k, r, j] for j in microbatches] for k in range(len(layout.objective.results))]
        work = functools.partial(stacked_predictions, layout.objective.model.joined)
        rows = writer.run(place, "predictions", work, {"results": rows})["predictions"]
        if layout.rows_cross:
            rows = writer.spread(place, [r], rows)
        outputs |= {Port(place, "predictions", k): number for k, number in enumerate(rows)}
    return writer.finish(outputs)
