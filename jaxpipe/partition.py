"""``partition``: plan how a model is trained on a mesh."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import optax
from jax.sharding import Mesh

from jaxpipe.agreement import agreed
from jaxpipe.array_types import PyTree
from jaxpipe.costs.given_seconds import SecondsOf
from jaxpipe.costs.network import Network
from jaxpipe.costs.profile import Profile
from jaxpipe.costs.profile_model import EstimateFor, Source
from jaxpipe.gradients.block_sparse import BlockSparse
from jaxpipe.gradients.outer_loop import OuterLoop
from jaxpipe.graph.allowed_codecs import Codecs
from jaxpipe.graph.sharding_annotations import outside_mesh
from jaxpipe.models import check_batch
from jaxpipe.models.bind import needs_variables
from jaxpipe.models.bound_model import UserFunction
from jaxpipe.models.check_arguments import check_function
from jaxpipe.options import PlanOptions
from jaxpipe.pipeline import Pipeline
from jaxpipe.plan import Plan
from jaxpipe.planning.check_request import Request, check_request
from jaxpipe.planning.compare_requests import request_parts
from jaxpipe.planning.given_plan import read_plan
from jaxpipe.planning.make_plan import make_plan
from jaxpipe.schedules.schedule_makers import ScheduleMaker
from jaxpipe.sharding.mesh_axes import joined_mesh


@outside_mesh()
def partition(
    model: Any,
    mesh: Mesh,
    batch: Any = None,
    *,
    loss: UserFunction,
    optimizer: optax.GradientTransformation,
    evaluate: UserFunction | None = None,
    predict: UserFunction | None = None,
    memory: int | str | None = None,
    num_microbatches: int | None = None,
    schedule: ScheduleMaker | str = "auto",
    profile: Profile | EstimateFor | Source | SecondsOf | None = None,
    network: Network | None = None,
    storage: Codecs | Literal["auto"] = "auto",
    gradient_exchange: BlockSparse | OuterLoop | Literal["dense"] = "dense",
    runtime: Literal["auto", "mpmd", "spmd"] = "auto",
    cuts: Sequence[str | tuple[str, int]] | None = None,
    plan: Plan | str | Mapping[str, Any] | None = None,
    options: PlanOptions | None = None,
) -> Pipeline:
    """Plan how a model is trained as a pipeline over the ``stage`` axis of a mesh.

    The model is traced and its operators are profiled; a min-max dynamic program cuts them into as many stages as
    the mesh has. The model itself needs no change: any cut is possible but between two uses of one variable.

    Several processes (``jax.distributed``) call it alike, with a mesh of all their devices. They first compare what
    they have been given, with the programs and constants that it leads to, and where these differ all raise; then the
    first one measures and chooses for all.

    Args:
      model: a Linen module, an NNX module or class, ``jax.tree_util.Partial(f, params)``, or ``f(variables, *args)``.
      mesh: with an axis ``stage``, and perhaps ``data``: replicas of the pipeline. Axes called ``pp``, ``pipe``,
        ``pipeline`` or ``stages`` and ``dp``, ``batch``, ``replica`` or ``replicas`` are taken for them;
        ``Pipeline.mesh`` has the names ``stage`` and ``data``. Any other axis shards within a stage: each stage of a
        replica is on a submesh of these axes, over which the model's own annotations split parameters and activations
        (``nn.with_partitioning``, logical axes, ``nnx`` metadata, ``with_sharding_constraint``, ``shard_map``), or
        ``PlanOptions.shardings``.
      batch: arrays or shapes ``[examples, ...]``, of the whole batch if there are several processes. Arrays without
        an axis are the same in every micro-batch; where first axes differ, as those of nodes and edges of graphs do,
        the batch is one micro-batch. Random keys (``jax.random.key``) are arrays, too. Left out: planned at
        ``Pipeline.init(key, batch)``. A list of trees of one structure are batches of several sizes (lengths of
        sequences, a smaller last batch): it is planned for the first, and the first step compiles all of them. Sizes
        that are not listed are compiled when they are met. One program (``"spmd"``) takes one size.
      loss: ``loss(model, batch)`` gives a scalar, ``(scalar, metrics)``, or ``(sum, weight, metrics)`` if
        micro-batches weigh unequally (padded tokens); then loss, metrics and gradient are divided by the total weight
        of the batch, of which there is a warning if it is zero. ``metrics`` is a tree of arrays that are reduced over
        the examples. They are averaged over micro-batches and replicas, or divided by the total weight; those in
        ``jaxpipe.Sum(...)`` are added up. Integers are refused where they would be averaged, and so are arrays with an
        axis of examples. What is a sum over examples, or is divided by a sum of weights, and is averaged over
        micro-batches, gets a ``LossWarning``, and so does a mean beside a weight.
      optimizer: any optax optimizer that needs gradients, parameters and its own state, and nothing else; gets the
        gradient of the whole batch. A parameter whose gradient no part of the update reads is frozen
        (``optax.set_to_zero`` in a ``multi_transform``, ``selective_transform``, ``freeze``): no gradient of it is
        computed or kept, there is no backward pass below the first trained one, and the plan says what that saves. An
        optimizer that looks at all gradients (clipping by the global norm in front of the mask), and an exchange of
        gradients that is not dense, need them all.
      evaluate: like ``loss``, or gives metrics alone. It sets the mode itself, as a plain evaluation would:
        ``model.eval()`` in it for NNX (the module is a copy), ``model(x, train=False)`` or whatever the module calls
        it for Linen. If it draws random numbers all the same, a ``TrainingModeWarning`` says so.
      predict: ``predict(model, batch)`` gives arrays ``[examples, ...]``; it sets the mode as ``evaluate`` does.
      memory: most bytes on a device, as an int or a text such as ``"8GiB"``. If the default storage needs more, an
        integer program chooses for every tensor whether it is stored, in which form, or computed again. If it needs
        less, stages on GPUs run fewer products again.
      num_microbatches: per replica. None: enough for a bubble below a fifth, and, for a model that normalizes over
        examples (BatchNorm), few enough that each has at least 4. Fewer raise a ``FewExamplesWarning``, and so does a
        contrastive loss, whose negatives are those of a micro-batch, with several.
      schedule: ``(num_devices, num_microbatches) -> Schedule``, or the name of one in ``jaxpipe.schedules``, in any
        common spelling (``"1f1b"``, ``"GPipe"``, ``"zbv"``). ``"auto"``: the one whose step is predicted to be the
        shortest within the budget. With a program for each stage these are the textbook's 1F1B, interleaved,
        zero-bubble, zero-bubble V, GPipe, and, where over 1 % shorter, an order that is searched for with the seconds
        of the stages (``jaxpipe.schedules.list_schedule``); of those within 2 %, the one that keeps the fewest bytes of
        stashes. In one program they are 1F1B, zero-bubble and interleaved. It never chooses an asynchronous schedule.
      profile: ``"measured"`` (the default) runs operators on one device, once for a program (see
        ``profile_model``); ``"analytic"`` estimates them; or a ``Profile``; or a function of an operator
        (``jaxpipe.Work``) that gives its seconds, forward and backward.
      network: the links between the devices, in the order of ``mesh.devices.flat``. It decides which device runs which
        stage: ``pipeline.mesh`` has them in that order. Left out: the mesh stays as it is; links within a process are
        as fast as the devices' memory, and with ``profile="measured"`` one link between processes is measured and
        taken for all of them.
      storage: the codecs that may be used where a module is not decorated, as ``memory_encoded(codecs=...)`` takes
        them; ``"auto"`` is ``"fast"``, ``()`` stores what ``jax.grad`` does.
      gradient_exchange: ``jaxpipe.gradients.block_sparse(...)``: replicas of a stage send each other only the best
        blocks of their gradients. Without replicas, nothing is sent and nothing left out. Or
        ``jaxpipe.gradients.outer_loop(...)``, with ``runtime="spmd"``: replicas train apart and exchange what they have
        moved by, once in many steps. Metrics are then those of the replicas of a process, or of those connected to it
        by their stages; ``parameters``, ``evaluate``, ``predict`` and ``value_and_grad`` take the outer parameters.
      runtime: ``"mpmd"``: a compiled program for each stage, which the host dispatches; a device needs the memory of
        its own stage. ``"spmd"``: one program for all devices, each of which needs the memory of the largest stage.
        Asynchronous schedules, several devices in a stage, ``memory``, the host's memory and batches of several
        sizes need ``"mpmd"``, which ``"auto"`` is. In one program, as in any ``shard_map``, a host callback that
        raises blocks the process until XLA aborts it; with stage programs the step raises.
      cuts: names of modules at which stages begin, as the plan prints them: ``["Block_1", "Block_2", "head"]``, of NNX
        modules also as attributes (``"blocks.1"``); of layers in a scan ``"layers[12]"``. A module that is called
        several times is named with the call, counted from 0: ``("shared", 1)``. There are as many stages as the
        schedule has on all devices; cuts that are not given are searched for.
      plan: a ``Plan``, or its JSON as text or as ``json.loads`` reads it, which is run as it is: with its cuts,
        devices, schedule, micro-batches and storage. Nothing is profiled, searched for or compiled: that takes about as
        long as tracing. The model, the mesh and the shapes must be those that it was made for; of other arguments,
        those that a plan decides may be left out. A plan with a budget that was made by other versions of JAX, or for
        other devices, is compiled, and refused if it does not keep the budget here.
      options: ``jaxpipe.PlanOptions(...)``: devices per stage, scans over layers, the host's memory, steps that are not
        finite, the solver, shardings within a stage, ZeRO-1, names of mesh axes.

    Raises:
      PartitionError: if the mesh, the network, the loss, the optimizer, the gradient exchange or the number of stages
        does not fit, the host's memory cannot be used, or ``gradient_dtype`` is no type for sums of gradients.
      ScheduleError: if the schedule is not valid, or does not exist for this size.
      ModelError: if the model is none of the above, or ``storage`` names an unknown codec.
      BatchError: if the batch cannot be cut into micro-batches.
      MemoryBudgetError: if no plan within ``memory`` is found; its ``smallest`` is a budget that is kept.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> model = jax.tree_util.Partial(lambda w, x: x @ w, jnp.ones((3, 1)))
      >>> mesh = jax.make_mesh((1,), ("stage",))
      >>> pipeline = partition(model, mesh, jnp.ones((4, 3)), loss=lambda f, x: f(x).mean(), optimizer=optax.sgd(0.5))
      >>> state, metrics = pipeline.step(pipeline.init(jax.random.key(0)), jnp.ones((4, 3)))
      >>> float(metrics["loss"])
      3.0
    """
    functions = {"evaluate": evaluate, "predict": predict}

    def check() -> tuple[Request, list[PyTree]]:
        for name, function in functions.items():
            if function is not None:
                check_function(function, name)
        given = read_plan(plan)
        shapes = [None if x is None else check_batch.batch_shapes(x) for x in check_batch.listed_batches(batch)]
        request = Request(
            model=model,
            mesh=mesh,
            loss=loss,
            optimizer=optimizer,
            memory=memory,
            num_microbatches=num_microbatches,
            schedule=schedule,
            profile="measured" if profile is None else profile,
            network=network,
            storage=storage,
            gradient_exchange=gradient_exchange,
            runtime=runtime if runtime != "auto" else "spmd" if given and given.runtime == "spmd" else "mpmd",
            cuts=cuts,
            plan=given,
            options=PlanOptions() if options is None else options,
            several_sizes=len(shapes) > 1,
        )
        return check_request(request), shapes

    request, shapes = agreed("jaxpipe.partition", check, lambda checked: request_parts(*checked, functions))
    planned = None if shapes[0] is None or needs_variables(model) else make_plan(request, shapes[0])
    make = functools.partial(make_plan, request)
    return Pipeline(joined_mesh(request.mesh, request.submesh), functions, optimizer, make, planned, shapes)
