"""``Pipeline``: a planned model on a mesh."""

# More than 15 of our modules: each method calls the room that does its work.
import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpipe import multihost
from jaxpipe.agreement import agree
from jaxpipe.array_types import Array, PyTree
from jaxpipe.checkpoint.checkpoint_layout import put, take
from jaxpipe.checkpoint.contents import Contents
from jaxpipe.checkpoint.orbax_files import Directory, Writer, open_checkpoint
from jaxpipe.checkpoint.orbax_files import steps as steps_of
from jaxpipe.costs.profile import Profile
from jaxpipe.errors import BatchError, ModelError, PartitionError
from jaxpipe.graph.sharding_annotations import outside_mesh
from jaxpipe.models import check_batch
from jaxpipe.models.batch_statistics import warn_if_training
from jaxpipe.models.bound_model import UserFunction, with_values
from jaxpipe.models.check_arguments import check_outside_jit, outside_jit, random_key
from jaxpipe.models.loss_scaling import check_means
from jaxpipe.models.microbatch_program import MicrobatchProgram, check_rows, trace_loss, trace_prediction, with_rows
from jaxpipe.models.variable_trees import holds_optimizer, optimizer_leaves, steps_taken
from jaxpipe.plan import Plan
from jaxpipe.planning.candidate import PlannedStep
from jaxpipe.planning.compare_requests import check_settings, settings, state_parts
from jaxpipe.planning.cuts.placed_stages import Partition, as_planned, stage_speeds
from jaxpipe.planning.describe_plan import processes_of
from jaxpipe.planning.make_plan import compiled_plan
from jaxpipe.planning.memory_report import MemoryReport
from jaxpipe.planning.plan_timeline import plan_timeline
from jaxpipe.planning.refuse_budget import check_budget
from jaxpipe.runtime import check_state, nonfinite_origin, shard_batch
from jaxpipe.runtime.executable_plan import Batching, ForwardPass, StepResults
from jaxpipe.runtime.hold_signals import hold_signals
from jaxpipe.runtime.initialize_state import initial_arrays, place_state
from jaxpipe.runtime.nonfinite_origin import NonFiniteOrigin
from jaxpipe.runtime.recent import recent
from jaxpipe.runtime.select_runtime import Runtime, runtime_of
from jaxpipe.runtime.train_state import TrainState, microbatch_key, take_over
from jaxpipe.runtime.zero_weight import WeightWatch
from jaxpipe.schedules import Schedule, Timeline
from jaxpipe.text.progress import progress
from jaxpipe.text.units import bytes_text, whole_number


if TYPE_CHECKING:
    import optax

T = TypeVar("T")


class Pipeline:
    """A model that trains in stages; made by ``jaxpipe.partition``."""

    def __init__(
        self,
        mesh: Mesh,
        functions: Mapping[str, UserFunction | None],
        optimizer: "optax.GradientTransformation",
        make_plan: Callable[[PyTree, PyTree], PlannedStep],
        planned: PlannedStep | None,
        batches: Sequence[PyTree] = (None,),
    ):
        self._mesh = mesh
        self._functions = dict(functions)
        self._optimizer = optimizer
        self._make_plan = make_plan
        self._ready = None if planned is None else (planned, runtime_of(planned))
        self._batch, *self._ahead = batches
        self._settings = settings()
        self._steps = itertools.count(1)  # for traces
        self._forwards: dict[Hashable, tuple[MicrobatchProgram, ForwardPass]] = {}
        self._looked_at: set[str] = set()  # evaluate, predict: whether they train is looked at once
        self._lock = threading.Lock()
        self._weights = WeightWatch()
        self._folders: list[Directory] = []  # of checkpoints, in the order of their first use

    def __reduce__(self) -> NoReturn:
        """Say what to do instead of pickling or copying."""
        raise ModelError(
            "A Pipeline cannot be pickled or copied: it has devices and compiled programs. Call jaxpipe.partition "
            "with profile=pipeline.profile to measure nothing again; states can be pickled, or use pipeline.save."
        )

    @property
    def plan(self) -> Plan:
        """The plan.

        Raises:
          PartitionError: if there was no batch to plan with yet, or a function's variables are not known yet.
        """
        return self._planned.plan

    @property
    def profile(self) -> Profile:
        """The costs of all operators, of which plans are sums; raises as ``plan``, and if that was given."""
        return self._planned.profile

    @property
    def partition(self) -> Partition:
        """The plan's stages, with the profile and the network they were chosen for. Raises as ``plan``."""
        return as_planned(self._planned.partition, self.plan)

    @property
    def schedule(self) -> Schedule:
        """The table that a training step walks through. Raises as ``plan``."""
        return self._planned.program.schedule

    @outside_mesh()
    def timeline(self, *, measured: bool = False) -> Timeline:
        """Return who computes what when in a training step, as its runtime runs it. Raises as ``plan``.

        Args:
          measured: compile each stage's forward and backward work by itself, run it on the stage's own device while
            the others wait, and lay out the medians; sending is not measured and not in it. Else all is as the plan
            predicts.

        Returns:
          What ``jaxpipe.traces.write_trace`` writes and ``jaxpipe.pictures.draw_timeline`` draws.
        """
        planned = self._planned
        if measured:
            from jaxpipe.visualize.measured_timeline import measure_timeline

            return measure_timeline(planned.program, self.mesh, lockstep=planned.plan.runtime == "spmd")
        processes = processes_of(self._mesh, planned.partition, self.schedule)
        return plan_timeline(planned.plan, self.schedule, stage_speeds(planned.partition), processes)

    @outside_mesh()
    def report(self, path: str | os.PathLike[str], *, compile: bool = True, measure: bool = False) -> None:
        """Write one HTML page about the plan, which needs nothing else to be read: no network and no JavaScript.

        It has the stages on their devices, the timeline, memory over time, what each method saves, predicted beside
        compiled bytes, and the plan as JSON.

        Args:
          path: the file, in a folder that exists; ``.html``, if it has a suffix.
          compile: whether to compile the training step, for the bytes that XLA reserves.
          measure: whether to measure the stages, for a second timeline.

        Raises:
          ImportError: if matplotlib is not installed.
          OSError: if the page cannot be written there.
          PartitionError, MemoryBudgetError: as ``plan`` and ``memory_report``; or if ``path`` has another suffix.
        """
        from jaxpipe.visualize.html_report import check_path, page
        from jaxpipe.visualize.pictures import load_figure_class

        check_path(path)  # before anything is compiled
        load_figure_class("Pipeline.report")
        memory = self.memory_report() if compile else None
        timelines = {"": self.timeline()}
        if measure:
            timelines["measured, stage by stage, without sending"] = self.timeline(measured=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(page(self.plan, self.partition, self._planned.program, timelines, memory))

    def __repr__(self) -> str:
        """The plan in a line; ``print(pipeline.plan)`` has all of it."""
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        if (plan := self.plan if self._ready else None) is None:
            return f"Pipeline(mesh: {axes}; no plan yet)"
        cut = f"{len(plan.stages)} stages, {plan.num_microbatches} micro-batches of {plan.microbatch_size}"
        cut += f", schedule {plan.schedule}, {bytes_text(plan.predicted_bytes)} on each device"
        return f"Pipeline(mesh: {axes}; {cut}, plan {plan.identity!r})"

    def _repr_html_(self) -> str | None:
        """Return the plan as HTML, for notebooks, once there is one."""
        return self.plan._repr_html_() if self._ready else None

    @property
    def mesh(self) -> Mesh:
        """The devices it runs on, in the order of the plan once there is one."""
        return self._planned.all_devices if self._ready else self._mesh

    @property
    def _planned(self) -> PlannedStep:
        return self._planned_and_runtime[0]

    @property
    def _runtime(self) -> Runtime:
        return self._planned_and_runtime[1]

    @property
    def _planned_and_runtime(self) -> tuple[PlannedStep, Runtime]:
        if self._ready is None:
            raise PartitionError(
                "This pipeline has no plan yet, because partition was given no batch, or a function whose variables "
                "are not known. Call pipeline.init(key, batch) first, for a function with variables=; shapes will do."
            )
        planned, _ = self._ready
        if not planned.plan.memory:
            planned = planned.with_bytes()
            self._ready = planned, runtime_of(planned)
        return self._ready

    @outside_jit
    def init(
        self, key: Array, batch: PyTree = None, *, variables: PyTree = None, optimizer_state: PyTree = None
    ) -> TrainState:
        """The first training state, or one that goes on from plain training.

        Linen modules and NNX classes are initialized stage by stage, with the values that plain initialization with
        ``key`` gives; a concrete NNX module, or ``variables``, keep their values. The optimizer begins with
        ``optimizer.init``, unless its state is given.

        Args:
          key: for initial values, and for all random numbers of the run; ``jax.random.key(0)``, for example.
          batch: arrays or shapes; needed if ``partition`` was given none. Initial values that depend on data (those of
            weight normalization or codebooks) are made from its arrays, as ``module.init(key, ...)`` makes them, and
            without arrays from zeros, with an ``InitialValuesWarning``.
          variables: values of all the model's variables, in any tree with their paths: Linen variables (with or
            without the level ``params`` if that is all; frozen, boxed, or of a bound module), an NNX module, its state
            or pure dictionary, a tree of a function's. Or a flax ``TrainState`` (its ``params``, and the collections
            that are fields of its class) or an ``nnx.ModelAndOptimizer``, of which the optimizer state and the
            number of steps are taken too.
          optimizer_state: that of ``optimizer``, as plain optax has it for the model's parameters, or in any tree with
            its paths; or what holds it: an ``nnx.Optimizer``, a ``TrainState``, whose number of steps is taken too.

        Raises:
          PartitionError: if there is no batch to plan with, ``key`` is no random key, or the optimizer's first state is
            made of parameters of several stages and not given.
          ModelError: if ``variables`` or ``optimizer_state`` do not fit; it lists what is missing, unexpected, or of
            another shape.
        """
        key = random_key(key)
        shapes = self._batch if batch is None else check_batch.batch_shapes(batch)
        if self._ready is None and shapes is not None:
            planned = self._make_plan(shapes, variables)
            self._ready = planned, runtime_of(planned)
        planned = self._planned
        model = planned.model if variables is None else with_values(planned.model, variables)
        if model.original.values is None and model.original.make is None:
            raise PartitionError("The model has no values and cannot be initialized; pass variables= to init.")
        if optimizer_state is None and holds_optimizer(variables):
            optimizer_state = variables
        slots = None
        if optimizer_state is not None:
            parameters = model.original.parameter_tree([v.aval for v in model.original.parameters])
            slots = optimizer_leaves(optimizer_state, planned.update.by_stage.state_shape, parameters)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(batch)):
            batch = None
        step = steps_taken(optimizer_state, variables)
        agree("Pipeline.init", lambda: state_parts(key, shapes, model, slots, step))
        arrays = initial_arrays(planned, model, self._optimizer, key, slots, batch)
        return place_state(self._runtime, arrays, key, step)

    def step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, PyTree]]:
        """One training step; donates ``state``.

        Ctrl-C waits for the step, if that has begun. Whatever is raised then, ``state`` has taken the new state's
        arrays, ``state.step`` included, and can be passed on.

        Args:
          state: before the step.
          batch: of the shapes planned for. In several processes each passes its own rows of it, ``local_rows``, those
            of the replicas of which it has a stage: where the stages of one replica are spread over processes, all of
            these pass the same rows, and without replicas all pass the whole batch. Or global arrays. Arrays without
            an axis of examples are the same in all. This holds for all that takes a batch.

        Returns:
          The new state, and metrics: ``loss``, ``gradient_norm`` (of the gradients that the optimizer reads),
          ``learning_rate`` if the optimizer was made with ``optax.inject_hyperparams``, those of the loss function
          (averaged over micro-batches, or added up in ``jaxpipe.Sum``; see ``partition``), and, with a block-sparse
          exchange, ``sent_share`` (of the squared norm of gradients and residuals) and ``residual_norm``. With
          ``on_nonfinite="skip"``, how many steps have been ``skipped`` since ``init``, and of this one
          ``nonfinite_stages``, a flag for each stage: whether its gradients were not finite. A metric of the loss
          function with one of these names stands in its place.

        Raises:
          BatchError, ModelError: if an argument does not fit the plan, or the state was passed to a step before.
          NonFiniteError: if a loss or a gradient is not finite, with ``on_nonfinite="raise"``.
        """
        check_outside_jit("step")  # no decorator: Ctrl-C in it, after the step, would lose the new state
        taken = new = None
        try:
            with outside_mesh():
                shapes = self._check(state, batch)
                self._prepare(shapes)
                taken = self._runtime.fitted(state)
                with hold_signals(), jax.profiler.StepTraceAnnotation("Pipeline.step", step_num=next(self._steps)):
                    results = self._run(self._runtime.step, taken, batch, shapes)
                    new = results.state  # until it has a name, signals wait
                metrics = self._metrics(new, batch, results)
            return new, metrics
        except BaseException as error:
            if new is not None:
                take_over(state, new)
            elif taken is not None and state.is_donated and not isinstance(error, ModelError):
                saved = [(folder, max(numbers)) for folder in self._folders if (numbers := steps_of(folder))]
                stages = self._planned.program.placement.parameters if self.plan.runtime == "mpmd" else ()
                check_state.lose(state, error, stages, saved[-1] if saved else None)
            raise

    def _named(self, objective: MicrobatchProgram, loss: Array, leaves: Sequence[Array]) -> dict[str, PyTree]:
        """The loss beside the user's metrics; metrics that are not a dictionary stand under ``"metrics"``."""
        if objective.weighted:
            *leaves, weight = leaves
            self._weights.look(weight)
        metrics = jax.tree.unflatten(objective.tree, leaves)
        by_name = metrics if isinstance(metrics, dict) else {"metrics": metrics}
        return by_name if objective.metrics_only else {"loss": loss, **by_name}

    def _prepare(self, shapes: PyTree) -> None:
        """Compile the training step for a batch, and the first time for all that ``partition`` was given."""
        self._prepare_shapes(shapes)
        while self._ahead:
            self._runtime.check_batch(self._ahead[-1])
            self._prepare_shapes(self._ahead.pop())

    def _prepare_shapes(self, shapes: PyTree) -> None:
        planned = self._planned
        if planned.plan.budget is not None and check_batch.shape_key(shapes) == check_batch.shape_key(planned.batch):
            if planned.compiled is None:
                self._use(PlannedStep.with_step)
            check_budget(self._planned)
        self._runtime.prepare(shapes)

    def _use(self, compiled: Callable[[PlannedStep], PlannedStep]) -> None:
        """Compile the training step of a plan with a budget, and use what that gives."""
        with progress("Compiling the training step"):
            planned = compiled(self._planned)
        if planned is not self._planned:
            self._ready = planned, runtime_of(planned)

    def _run(self, function: Callable[..., T], state: TrainState, *arguments: PyTree) -> T:
        """Run a function of a state; of two threads that pass one state, a step gets it and the other an error."""
        with self._lock:
            check_state.check_state(state)
            return function(state, *arguments)

    def _metrics(self, state: TrainState, batch: PyTree, results: StepResults) -> dict[str, PyTree]:
        """Return the metrics of a step that has led to a state; with ``on_nonfinite="raise"`` it may raise instead."""
        counters, planned = results.counters, self._planned
        if not any(stage.vjp and stage.vjp.plan.uncertain for stage in planned.program.stages):
            del counters["overflows"]
        if planned.update.on_nonfinite is not None:
            stages, stopped = counters.pop("nonfinite_stages"), counters.pop("stopped")
            if planned.update.on_nonfinite == "skip":
                counters["nonfinite_stages"] = stages
            elif stopped:
                raise nonfinite_origin.error(self._runtime, state, batch, results, np.flatnonzero(stages).tolist())
        named = self._named(planned.program.objective, results.loss, results.metrics)
        return named | counters | named  # what the loss function names itself stays

    @outside_jit
    def find_nonfinite(self, state: TrainState, batch: PyTree) -> NonFiniteOrigin | None:
        """Find where a loss is first not finite: stage, micro-batch and operator; slow, as nothing is compiled.

        Args:
          state: before the step, for the same random numbers.
          batch: as for ``step``.

        Returns:
          None if it is finite.

        Raises:
          PartitionError: in several processes.
        """
        if jax.process_count() > 1:
            raise PartitionError(
                f"find_nonfinite needs all stages in one process, and there are {jax.process_count()}. Save the state, "
                "and restore it in one process."
            )
        self._check(state, batch)
        return nonfinite_origin.find(self._runtime, self._runtime.fitted(state), batch)

    @outside_jit
    def value_and_grad(self, state: TrainState, batch: PyTree) -> tuple[tuple[Array, dict[str, PyTree]], PyTree]:
        """``((loss, metrics), gradients)``; gradients in the model's own layout, as host arrays.

        They are those that ``step`` hands to the optimizer: zeros for parameters that it does not train.
        """
        shapes = self._check(state, batch)
        state = self._runtime.fitted(state)
        loss, metrics, given = self._run(self._runtime.gradients, state, batch, shapes)
        planned = self._planned
        pairs = zip(given, (v.aval for v in planned.model.parameters), strict=True)
        gradients = [np.zeros(aval.shape, aval.dtype) if g is None else g for g, aval in pairs]
        named_metrics = self._named(planned.program.objective, loss, metrics)
        return (loss, named_metrics), planned.model.parameter_tree(gradients)

    @outside_jit
    def evaluate(self, state: TrainState, batch: PyTree) -> dict[str, PyTree]:
        """The loss and metrics of a batch of any size, from those of ``evaluate(model, batch)`` as in ``step``.

        The function sets the mode itself (``model.eval()`` in NNX, the module's own argument in Linen); if it draws
        random numbers or computes new batch statistics, there is a ``TrainingModeWarning``.

        Raises:
          BatchError: if the batch cannot be split over the replicas.
          PartitionError: if partition was given no ``evaluate``.
        """
        objective, run = self._forward("evaluate", state, batch)
        return self._named(objective, *self._run(run, self._runtime.fitted(state), batch))

    @outside_jit
    def predict(self, state: TrainState, batch: PyTree) -> PyTree:
        """Return the results of ``predict(model, batch)`` for all rows of a batch of any size; global arrays.

        The function sets the mode itself, as for ``evaluate``.
        """
        objective, run = self._forward("predict", state, batch)
        return jax.tree.unflatten(objective.tree, self._run(run, self._runtime.fitted(state), batch))

    @outside_jit
    def parameters(self, state: TrainState) -> PyTree:
        """The model's own variables in the model's own layout, as host arrays; all processes call it, and get all."""
        arrays = self._runtime.to_host(self._fitted(state, "Pipeline.parameters"))
        return self._planned.model.variable_tree(arrays.parameters, arrays.variables)

    @outside_jit
    def optimizer_state(self, state: TrainState) -> PyTree:
        """The optimizer state as optax has it for all of the model's parameters, as host arrays.

        All processes call it, and get all. With ``parameters`` plain training goes on from it: in the fields of a flax
        ``TrainState``, or in an ``nnx.Optimizer`` by ``nnx.update(optimizer.opt_state, nnx.state(...))``.
        """
        fitted = self._fitted(state, "Pipeline.optimizer_state")
        by_stage = self._planned.update.by_stage
        leaves = by_stage.state_stacks.join(self._runtime.to_host(fitted).optimizer)
        return jax.tree.unflatten(jax.tree.structure(by_stage.state_shape), leaves)

    @outside_jit
    def save(self, state: TrainState, directory: Directory, *, data: object = None) -> None:
        """Save a checkpoint as ``directory/<step>``, and wait until it is on disk. In a loop, use ``Checkpointer``.

        It is in the model's own layout: any pipeline of this model and optimizer can restore it, whatever its stages,
        replicas and devices, and ``jaxpipe.checkpoint.load`` can without one.

        Args:
          state: of this pipeline.
          directory: created if it does not exist.
          data: where the run is in its data, as JSON.

        Raises:
          CheckpointError: if ``data`` is not JSON, or there is a checkpoint of this or a later step.
        """
        contents = self._contents(state, data)
        self._folders.append(directory)
        with contextlib.closing(Writer(directory)) as writer:
            writer.write(contents)
            writer.wait()

    @outside_mesh()
    def restore(self, directory: Directory, *, step: int | None = None) -> TrainState:
        """The state of a checkpoint, made stage by stage; training goes on with the same bits.

        With another number of replicas, each gets the mean of the residuals of a block-sparse exchange.

        Args:
          directory: that it was saved to.
          step: which; left out: the last.

        Raises:
          CheckpointError: if the checkpoint is missing, damaged, or of another model or optimizer.
        """
        self._folders.append(directory)
        last = step if step is not None else multihost.from_first(lambda: max(steps_of(directory), default=None))
        return put(self._runtime, multihost.on_all(lambda: open_checkpoint(directory, last)))

    @outside_jit
    def adopt(self, state: TrainState) -> TrainState:
        """Copy a training state of another pipeline of the same model and optimizer to this one's stages.

        Cuts, devices, schedule, micro-batches and replicas may be others. The given state stays usable.

        Args:
          state: of a pipeline with ``runtime="mpmd"``, as this one.

        Raises:
          ModelError: if it is of another model or optimizer, or was passed to a step before.
          PartitionError: if this pipeline has one program for all devices, or in several processes.
        """
        return self._runtime.adopt(state)

    def local_rows(self, size: int) -> np.ndarray:
        """Return which rows of a batch this process passes to ``step`` and the others: those of its replicas, in order.

        All rows in one process, and wherever each replica has a stage in every process.

        Args:
          size: rows of the whole batch.

        Raises:
          BatchError: if they cannot be split over the replicas.
        """
        return shard_batch.local_rows(self.mesh, size)

    def _contents(self, state: TrainState, data: object) -> Contents | None:
        return take(self._runtime, self._fitted(state, "Pipeline.save or Checkpointer.save"), data)

    def _fitted(self, state: TrainState, call: str) -> TrainState:
        """Return a state of this plan with its arrays as the programs take them, once all processes are at a call."""
        check_state.check_state(state, self.plan.identity)
        fitted = self._runtime.fitted(state)
        multihost.meet(call)
        return fitted

    def microbatch_key(self, state: TrainState, j: int) -> Array:
        """Return the random key of micro-batch ``j`` in the step from ``state``; ``j`` counts over replicas.

        Linen modules get it as ``rngs``. In NNX modules the i-th random stream, in the order of paths, gets
        ``fold_in(key, i)``, or keys made of that (``jaxpipe.models.bind_nnx.reseed``). The key is on JAX's default
        device, whatever the mesh is.

        Raises:
          BatchError: if ``j`` is no number of a micro-batch.
        """
        check_state.check_state(state)
        if not isinstance(j, jax.Array | np.ndarray):
            j = whole_number(j, "j", BatchError)
            if j < 0:
                raise BatchError(f"j={j}; micro-batches are numbered from 0.")
        return microbatch_key(state, j)

    @outside_mesh()
    def compile(self) -> Plan:
        """Compile the training step, which the first ``step`` does otherwise, and return the plan.

        A plan of stage programs then tells the bytes that XLA reserves. One that was made with ``memory`` and
        ``PlanOptions(compile=False)`` may become another one here, which keeps the budget with these bytes. States of
        the plan before do not fit it: call ``init`` afterwards.

        Raises:
          MemoryBudgetError: if no plan keeps the budget.
          PartitionError: as ``plan``.
        """
        if self._planned.plan.runtime == "mpmd":
            self._use(compiled_plan)
        self._prepare(self._planned.batch)
        return self.plan

    @outside_mesh()
    def memory_report(self) -> MemoryReport:
        """Predicted bytes on each device beside those of the compiled training step; nothing is run."""
        if self.plan.budget is not None and self._planned.compiled is None:
            self._use(PlannedStep.with_step)
        reserved, temporary, host = self._runtime.bytes()
        plan = self.plan
        predicted_host = (0 if plan.host is None else plan.host.bytes,) * len(host)
        return MemoryReport(plan.device_bytes, reserved, temporary, predicted_host, host)

    def _check(self, state: TrainState, batch: PyTree, *, trains: bool = True) -> PyTree:
        """Check a state and a batch; return the shapes of the whole batch of which this process passes its rows."""
        check_settings(self._settings)
        check_state.check_state(state, self.plan.identity)
        shapes = shard_batch.whole_shapes(self.mesh, check_batch.batch_shapes(batch), batch)
        if trains:
            self._runtime.check_batch(shapes)
        return shapes

    def _forward(self, name: str, state: TrainState, batch: PyTree) -> tuple[MicrobatchProgram, ForwardPass]:
        """Return the program of ``evaluate`` or ``predict`` for a batch, and a function that runs it."""
        shapes = self._check(state, batch, trains=False)

        def made() -> tuple[MicrobatchProgram, ForwardPass]:
            objective, batching = self._trace_forward(name, shapes)
            return objective, self._runtime.forward(name, objective, shapes, batching)

        return recent(self._forwards, (name, check_batch.shape_key(shapes)), made)

    def _trace_forward(self, name: str, shapes: PyTree) -> tuple[MicrobatchProgram, Batching]:
        function = self._functions[name]
        if function is None:
            raise PartitionError(f"partition was given no {name} function; pass {name}=lambda model, batch: ...")
        planned = self._planned
        size, replicas = check_batch.batch_size(shapes), planned.batching.replicas
        planned.model.check_batch_size(size)
        parts = replicas * planned.model.joined
        counts = [m for m in range(1, planned.batching.num_microbatches + 1) if size % (parts * m) == 0]
        if not counts:
            check_batch.check_microbatches(shapes, parts, 1, f"batch for {name}")
        m = counts[-1]
        batching = Batching(check_batch.shared_leaves(shapes), replicas, m)
        rows = size // (replicas * m)
        microbatch = with_rows(shapes, rows)
        trace = trace_loss if name == "evaluate" else trace_prediction
        objective = trace(planned.model, function, microbatch, name)
        if name not in self._looked_at:
            self._looked_at.add(name)
            warn_if_training(objective, name)
            if name == "evaluate":
                check_means(objective, size, parts, m, name)
            if name == "predict" and parts * m > 1 and rows > 1:
                check_rows(objective, name)
        return objective, batching
