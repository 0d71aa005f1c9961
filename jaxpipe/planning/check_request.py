"""Checks of the arguments of ``partition``: most before anything is traced, some with the model."""

# More than 15 of our modules: each argument is checked by the module that uses it.
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, cast

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxpipe.costs.given_seconds import SecondsOf
from jaxpipe.costs.network import Network, check_network_units
from jaxpipe.costs.profile import Profile
from jaxpipe.costs.profile_model import EstimateFor, Source
from jaxpipe.costs.sharded_profile import groups_of
from jaxpipe.errors import BatchError, MemoryBudgetError, PartitionError
from jaxpipe.gradients.block_sparse import BlockSparse
from jaxpipe.gradients.outer_loop import OuterLoop
from jaxpipe.graph.allowed_codecs import FAST, Codecs, Policy, parse
from jaxpipe.models.bind import check_model
from jaxpipe.models.bound_model import BoundModel, UserFunction
from jaxpipe.models.check_arguments import check_flag, check_function, check_optimizer, check_seconds
from jaxpipe.models.joined_replicas import ReplicaAxis
from jaxpipe.models.unroll_layers import Unrolling, check_unroll
from jaxpipe.models.variable_shardings import check_exchanged
from jaxpipe.options import PlanOptions
from jaxpipe.plan import HostPlan, Plan
from jaxpipe.planning.given_cuts import check_cuts
from jaxpipe.planning.given_plan import check_all_same, check_same, recipe_in
from jaxpipe.planning.storage.fastest_choice import check_solver
from jaxpipe.runtime.gradient_precision import check_gradient_dtype
from jaxpipe.runtime.replica_exchange import check_exchange
from jaxpipe.runtime.select_runtime import RuntimeName, makers_for
from jaxpipe.schedules import BY_NAME, Schedule
from jaxpipe.schedules.schedule_makers import AUTO, ScheduleMaker, plain_name, schedule_named
from jaxpipe.sharding import mesh_axes
from jaxpipe.sharding.mesh_axes import COMMON_NAMES, DATA, STAGE, Submesh, joined_mesh
from jaxpipe.targets.known import target_named
from jaxpipe.text.stable_text import stable_text
from jaxpipe.text.units import asked_bytes, bytes_text, device_bytes, whole_number


@dataclass(frozen=True, eq=False, kw_only=True)
class Request:
    """The arguments of ``partition``, and what follows from them; of several ``schedules``, the fastest is wanted.

    ``check_request`` gives ``mesh`` the axes ``stage`` and perhaps ``data``, and the first device of each group of
    ``submesh``. ``devices_per_stage`` is how many of the devices along the stage axis each stage has, or whether that
    may be chosen. ``several_sizes``: batches of several sizes are listed. Of a ``replica_axis``, all replicas are
    within each stage.
    """

    model: Any
    mesh: Mesh
    loss: UserFunction
    optimizer: optax.GradientTransformation
    memory: int | str | None = None
    num_microbatches: int | None = None
    schedule: ScheduleMaker | str = "auto"
    profile: Profile | Source | EstimateFor | SecondsOf = "measured"
    network: Network | None = None
    storage: Codecs | Literal["auto"] = "auto"
    gradient_exchange: BlockSparse | OuterLoop | Literal["dense"] = "dense"
    runtime: RuntimeName = "mpmd"
    cuts: Any = ()
    plan: Plan | None = None
    options: PlanOptions = field(default_factory=PlanOptions)
    several_sizes: bool = False
    submesh: Submesh = field(default_factory=Submesh)
    replica_axis: ReplicaAxis | None = None
    devices_per_stage: bool | tuple[int, ...] = False

    @property
    def num_devices(self) -> int:
        """The devices along the stage axis."""
        return self.mesh.shape[STAGE]

    @property
    def replicas(self) -> int:
        """The replicas of the pipeline."""
        return self.mesh.shape.get(DATA, 1)

    @property
    def parts(self) -> int:
        """Into how many parts the replicas cut a batch, those that compute each micro-batch together included."""
        return self.replicas * (1 if self.replica_axis is None else self.replica_axis.size)

    @cached_property
    def budget(self) -> int | None:
        """The bytes of ``memory``."""
        return None if self.memory is None else device_bytes(self.memory)

    @cached_property
    def schedules(self) -> tuple[ScheduleMaker, ...]:
        """The makers of tables that are compared."""
        return makers_for(self.runtime, schedule_makers(self.schedule))

    @cached_property
    def policy(self) -> Policy:
        """The codecs where a module is not decorated."""
        return FAST if isinstance(self.storage, str) and self.storage == "auto" else parse(self.storage, "storage")

    @cached_property
    def exchange(self) -> BlockSparse | OuterLoop | None:
        """The exchange of gradient blocks, or an outer loop; None if gradients are exchanged whole."""
        return check_exchange(self.gradient_exchange, DATA)

    @cached_property
    def unroll_scans(self) -> Unrolling | Literal["auto"]:
        """The scans whose layers are cut apart."""
        return check_unroll(self.options.unroll_scans, self.exchange is not None)

    @cached_property
    def host(self) -> HostPlan | None:
        """The use of the host's memory, with nothing used yet; None if ``host_memory`` was left out."""
        given, widths, device = self.options.host_memory, self.devices_per_stage, self.mesh.devices.flat[0]
        if given is None:
            return None
        size = device_bytes(given, "host_memory")
        if self.budget is None:
            raise PartitionError(
                f"host_memory={given!r} without memory=: stashes go to the host only where the memory of a device is "
                "limited. Pass memory= too, the most bytes on a device, or leave host_memory= out."
            )
        if isinstance(widths, tuple) and max(widths) > 1:
            raise PartitionError(
                f"host_memory={given!r} with devices_per_stage={widths}: stashes go to the host only from stages with "
                "one device each. Leave out one of the two."
            )
        kinds = [memory.kind for memory in device.addressable_memories()]  # none of devices that are not here
        reason = f"{device.device_kind} has memory of the kinds {', '.join(kinds)}, and none is pinned_host"
        return HostPlan(size, 0, reason if kinds and "pinned_host" not in kinds else "")

    @cached_property
    def gradient_dtype(self) -> np.dtype | None:
        """The type in which gradients are added up."""
        return check_gradient_dtype(self.options.gradient_dtype)


def check_request(given: Request) -> Request:
    """Return a request with the mesh as planning has it, or raise the error that one of its arguments is worth."""
    options, profile = _check_options(given.options), given.profile
    mesh = mesh_axes.with_own_names(given.mesh, options.stage_axis, options.data_axis)
    num_devices, replicas = check_mesh(mesh)
    check_model(given.model)
    check_optimizer(given.optimizer)
    check_function(given.loss, "loss")
    num_microbatches = given.num_microbatches
    if num_microbatches is not None:
        num_microbatches = whole_number(num_microbatches, "num_microbatches", BatchError)
    if isinstance(profile, EstimateFor):
        target_named(profile.device)
    elif not isinstance(profile, Profile) and not callable(profile) and profile not in ("measured", "analytic"):
        raise PartitionError(
            f"profile={profile!r}; it must be 'measured', 'analytic', a jaxpipe.Profile, or a function of an operator "
            "(jaxpipe.Work) that gives its seconds, forward and backward."
        )
    if given.runtime not in ("mpmd", "spmd"):
        raise PartitionError(
            f"runtime={given.runtime!r}; it must be 'mpmd' (a program for each stage), 'spmd' (one program for all "
            "devices) or 'auto'."
        )
    check_network(given.network, mesh)
    _check_outer_loop(given, replicas)
    exchanged = given.exchange is not None
    replica_axis = _check_axis_name(options.axis_name, replicas, exchanged)
    mesh, submesh = mesh_axes.split_mesh(mesh if replica_axis is None else mesh_axes.with_joined_replicas(mesh))
    request = replace(
        given,
        mesh=mesh,
        submesh=submesh,
        num_microbatches=num_microbatches,
        cuts=check_cuts(given.cuts),
        replica_axis=replica_axis,
        devices_per_stage=check_devices_per_stage(options.devices_per_stage, num_devices, mesh, exchanged),
    )
    request = _for_plan(request)
    _ = request.budget
    check_exchanged(exchanged, submesh, options)
    _ = request.schedules, request.policy, request.unroll_scans, request.host, request.gradient_dtype  # they may raise
    return request


def _check_outer_loop(given: Request, replicas: int) -> None:
    """Raise ``PartitionError`` if an outer loop has no replicas, or comes with what needs the same step in all."""
    if not isinstance(given.exchange, OuterLoop):
        return
    if given.runtime != "spmd":
        raise PartitionError(
            "gradient_exchange=outer_loop(...) with runtime='mpmd', the default: replicas with parameters of their own "
            "are built for one program only. Pass runtime='spmd'."
        )
    if replicas == 1:
        raise PartitionError(
            f"gradient_exchange=outer_loop(...) on a mesh without replicas; there must be 2 or more along {DATA!r}. "
            "Add that axis to the mesh, or use gradient_exchange='dense'."
        )
    if given.options.on_nonfinite is not None:
        raise PartitionError(
            f"PlanOptions(on_nonfinite={given.options.on_nonfinite!r}) with gradient_exchange=outer_loop(...): between "
            "exchanges no replica knows whether a step of another one is finite. Leave out one of the two."
        )


def settings_of(request: Request) -> dict[str, str]:
    """Return the arguments that a plan does not show, and that its programs depend on, each as a text."""
    options = request.options
    return {
        "zero": str(options.zero),
        "on_nonfinite": str(options.on_nonfinite),
        "gradient_dtype": str(request.gradient_dtype),
        "gradient_exchange": "dense" if request.exchange is None else stable_text(request.exchange),
    }


def _for_plan(request: Request) -> Request:
    """Return a request with what its plan has decided; raise an error where the two differ."""
    plan = request.plan
    if plan is None:
        return request
    recipe, widths = recipe_in(plan), plan.stage_replicas
    if request.cuts:
        raise PartitionError("cuts= and plan= are both given, and a plan has its cuts. Pass one of the two.")
    check_same("mesh", recipe.mesh, {**request.mesh.shape, **request.submesh.shape})
    check_same("runtime", plan.runtime, request.runtime)
    check_same("storage", recipe.storage, request.policy.codecs_name)
    check_all_same(recipe.settings, settings_of(request))
    if request.num_microbatches is not None:
        check_same("num_microbatches", plan.num_microbatches, request.num_microbatches)
    if isinstance(request.devices_per_stage, tuple):
        check_same("devices_per_stage", widths.per_stage, request.devices_per_stage)
    if len(request.schedules) == 1:
        table = request.schedules[0](len(recipe.table), widths.rounds(plan.num_microbatches))
        check_same("schedule", plan.schedule, table.name)
        check_same("stages of the schedule's devices", recipe.stage_of, table.stage_of)
    needed = plan.compiled_bytes or plan.predicted_bytes
    if request.budget is not None and needed > request.budget:
        raise MemoryBudgetError(
            f"plan= and memory differ: the plan needs {needed} bytes ({bytes_text(needed)}) on the fullest device, and "
            f"{asked_bytes(request.memory, request.budget)}. Leave out plan= for one that keeps that.",
            needed,
        )
    if request.budget is not None:
        plan = replace(plan, budget=request.budget, raised_from=None)
    flat, places = request.mesh.devices.flatten(), sorted(set(recipe.devices))
    used = sorted({d for stage in plan.stages for d in stage.devices})
    if not places or len(places) != len(recipe.devices) or places[-1] >= len(flat) or used != list(range(len(places))):
        raise PartitionError(
            f"plan=: recipe.devices is {recipe.devices[:16]}, of {len(flat)}, for the stages on {used}."
        )
    shape = [len(places) // request.replicas if name == STAGE else n for name, n in request.mesh.shape.items()]
    mesh = Mesh(flat[places].reshape(shape), request.mesh.axis_names, axis_types=request.mesh.axis_types)
    every, those = (joined_mesh(outer, request.submesh) for outer in (request.mesh, mesh))
    network = None if request.network is None else groups_of(request.network, every, those, Submesh())[0]
    return replace(
        request,
        plan=plan,
        mesh=mesh,
        network=network,
        memory=plan.budget if request.memory is None else request.memory,
        num_microbatches=plan.num_microbatches,
        devices_per_stage=False if widths.is_single else widths.per_stage,
    )


def _check_axis_name(name: str | None, replicas: int, exchanged: bool) -> ReplicaAxis | None:
    """Return the axis over which collectives mix replicas; None if there is nothing to mix."""
    if not isinstance(name, str | None):
        raise PartitionError(f"PlanOptions(axis_name={name!r}); it must be an axis' name, such as 'batch', or None.")
    if name is None or replicas == 1:
        return None
    if exchanged:
        raise PartitionError(
            f"PlanOptions(axis_name={name!r}) with gradient_exchange=block_sparse(...): replicas that compute a "
            "micro-batch together have one gradient, of which nothing is left to exchange. Leave out one of the two."
        )
    return ReplicaAxis(name, replicas)


def _check_options(options: PlanOptions) -> PlanOptions:
    if not isinstance(options, PlanOptions):
        raise PartitionError(f"options={options!r}; pass jaxpipe.PlanOptions(...), or leave it out.")
    for name in ("allow_over_budget", "fresh_profile"):
        check_flag(getattr(options, name), name)
    if options.compile is not None:
        check_flag(options.compile, "compile")
    if options.time_limit is not None:
        check_seconds(options.time_limit, "time_limit")
    check_solver(options.solver)
    if options.on_nonfinite not in (None, "raise", "skip"):
        raise PartitionError(f"on_nonfinite={options.on_nonfinite!r}; it must be 'raise', 'skip' or None.")
    return options


def check_mesh(mesh: Mesh) -> tuple[int, int]:
    """Stages and replicas of a mesh, whose axes have the names of ``with_own_names``."""
    if not isinstance(mesh, Mesh):
        raise PartitionError(
            f"mesh is {type(mesh).__name__}; partition needs a jax.sharding.Mesh with an axis {STAGE!r}, for example "
            f"jax.make_mesh((4,), ({STAGE!r},))."
        )
    if STAGE not in mesh.axis_names:
        raise PartitionError(
            f"The mesh has the axes {mesh.axis_names}. A pipeline uses {STAGE!r} (required); {DATA!r} makes replicas, "
            f"and any other axis shards within a stage. Make it with jax.make_mesh((2, 4), ({DATA!r}, {STAGE!r})), or "
            "say which axis is which: options=jaxpipe.PlanOptions(stage_axis=...). Names that are taken for them: "
            f"{', '.join(map(repr, COMMON_NAMES[STAGE][1:]))}; {', '.join(map(repr, COMMON_NAMES[DATA][1:]))}."
        )
    for axis, names in COMMON_NAMES.items():
        twice = [name for name in mesh.axis_names if name in names]
        if len(twice) > 1:
            raise PartitionError(
                f"The mesh has the axes {mesh.axis_names}, of which {' and '.join(map(repr, twice))} are both taken "
                f"for {axis!r}. Give one of them another name: a mesh has one axis of stages, at most one of replicas, "
                "and others that shard within a stage."
            )
    without = set(range(jax.process_count())) - {device.process_index for device in mesh.devices.flat}
    if without:
        raise PartitionError(
            f"The mesh has no device of process {', '.join(map(str, sorted(without)))}, of {jax.process_count()}. All "
            "processes of a run take part in its pipeline: make the mesh of jax.devices()."
        )
    return mesh.shape[STAGE], mesh.shape.get(DATA, 1)


def check_devices_per_stage(
    given: bool | int | Sequence[int], num_devices: int, mesh: Mesh, exchanged: bool
) -> bool | tuple[int, ...]:
    """Return how many devices each stage has, or whether that may be chosen; ``exchanged``: by gradient blocks."""
    if isinstance(given, bool):
        widths = given
    elif isinstance(given, int):
        if given < 1 or num_devices % given:
            raise PartitionError(
                f"devices_per_stage={given}: each stage would have {given} of the {num_devices} devices along "
                f"{STAGE!r}, which is no multiple of that. Pass a divisor of {num_devices}, or a number for each stage "
                "that add up to it."
            )
        widths = (given,) * (num_devices // given)
    else:
        good = isinstance(given, Sequence) and all(type(k) is int and k > 0 for k in given)
        if not good or sum(given) != num_devices:
            raise PartitionError(
                f"devices_per_stage={given!r}; it must be True (the planner chooses), False, a number of devices for "
                f"every stage, or a sequence of numbers above 0, one for each stage, that add up to the {num_devices} "
                f"device(s) along {STAGE!r}, such as {(num_devices - 1, 1) if num_devices > 1 else (1,)}."
            )
        widths = tuple(given)
    if not widths or num_devices == 1 or (isinstance(widths, tuple) and max(widths) == 1):
        return False
    if DATA in mesh.axis_names:
        raise PartitionError(
            f"devices_per_stage={given!r} gives stages several devices along {STAGE!r}, and the mesh has an axis "
            f"{DATA!r} for replicas of the whole pipeline; there can be one of the two. Make a mesh with the axis "
            f"{STAGE!r} alone, or leave devices_per_stage= out."
        )
    if exchanged:
        raise PartitionError(
            f"devices_per_stage={given!r} with gradient_exchange=block_sparse(...): blocks are exchanged between the "
            f"replicas of a whole pipeline only. Use a mesh axis {DATA!r}, or 'dense'."
        )
    return widths


def check_network(network: Network | None, mesh: Mesh) -> None:
    """Raise ``PartitionError`` unless a network is that of the mesh, in bytes and bytes a second."""
    if not isinstance(network, Network | None):
        raise PartitionError(f"network is {type(network).__name__}; it must be a jaxpipe.Network.")
    if network is not None and network.num_devices != mesh.devices.size:
        raise PartitionError(
            f"network= has {network.num_devices} devices, the mesh {mesh.devices.size}; it must have one for each, in "
            "the order of mesh.devices.flat."
        )
    if network is not None:
        check_network_units(network)


def check_runtime_features(request: Request, schedules: Sequence[Schedule]) -> None:
    """Raise ``PartitionError`` if ``runtime="spmd"`` comes with a feature that only ``"mpmd"`` has."""
    if request.runtime != "spmd":
        return
    updating = next((f"schedule={table.name}" for table in schedules if table.versions is not None), None)
    turning = next((f"schedule={table.name}" for table in schedules if not table.takes_turns), None)
    axis, widths, zero = request.replica_axis, request.devices_per_stage, request.options.zero
    joined = None if axis is None else f"PlanOptions(axis_name={axis.name!r})"
    axes = ", ".join(map(repr, request.submesh.shape))
    features = {  # what was requested, if so, by the rule that it breaks
        "one program updates weights at the end of a step, not between micro-batches": updating,
        "the devices of one program pass messages around a ring, where they take turns": turning,
        "in one program each stage of a pipeline is on one device": widths and f"devices_per_stage={widths}",
        "one program keeps stashes in the devices' own memory": request.host and "host_memory=",
        "in one program each replica computes its micro-batches by itself": joined,
        "in one program a stage is on one device, not sharded over several": axes and f"the mesh axes {axes}",
        "in one program each replica has all of the optimizer state": zero and f"zero={zero}",
        "in one program each device reserves the memory of the largest stage": request.budget and "memory=",
        "one program has one size": request.several_sizes and "batches of several sizes",
    }
    for rule, feature in features.items():
        if feature:
            raise PartitionError(
                f"runtime='spmd' with {feature}: {rule}. Pass runtime='mpmd', the default: a program for each stage."
            )


def check_model_features(request: Request, model: BoundModel) -> None:
    """Raise ``PartitionError`` if a model has variables that what was requested cannot train."""
    names = [model.parameters[k].name for k in sorted(model.overwritten)][:1]
    rows = [v.name for v, axis in zip(model.state, model.examples, strict=True) if axis is not None][:1]
    keys = [v.name for v in model.state if jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.prng_key)][:1]
    reasons = {
        "becomes its gradient, and one program adds up gradients": names,
        "has a row for each example": rows,
        "is a typed random key (jax.random.key_data makes numbers of it)": keys,
    }
    for reason, refused in reasons.items():
        if request.runtime == "spmd" and refused:
            raise PartitionError(
                f"runtime='spmd' with the variable {refused[0]}: it {reason}, which only stage programs keep apart. "
                "Leave runtime= out."
            )
    if names and request.exchange is not None:
        raise PartitionError(
            f"gradient_exchange=block_sparse(...) with the variable {names[0]}: it becomes its gradient, of which no "
            "block may be left out. Use gradient_exchange='dense'."
        )
    if rows and request.replica_axis is not None:
        raise PartitionError(
            f"PlanOptions(axis_name={request.replica_axis.name!r}) with the state variable {rows[0]}, which has a row "
            "for each example of a batch: a micro-batch of several replicas has no rows side by side. Leave out one."
        )
    if rows and request.several_sizes:
        raise PartitionError(
            f"Batches of several sizes with the state variable {rows[0]}, which has a row for each example of a batch: "
            "it has one size. Pass batches of one size."
        )


def schedule_makers(schedule: ScheduleMaker | str) -> tuple[ScheduleMaker, ...]:
    """Return the makers of the requested tables, of which the planner takes the fastest."""
    if isinstance(schedule, str) and plain_name(schedule) == "auto":
        return AUTO
    maker = schedule_named(schedule) if isinstance(schedule, str) else schedule
    if isinstance(schedule, Schedule):
        raise PartitionError(
            f"schedule= is a table, {schedule.name} for {schedule.num_devices} devices; partition asks for one of the "
            "size that it needs. Pass a function: schedule=lambda num_devices, num_microbatches: table."
        )
    if not callable(maker):
        raise PartitionError(
            f"schedule={schedule!r}; it must be 'auto', {', '.join(map(repr, BY_NAME))}, or a function (num_devices, "
            "num_microbatches) -> Schedule, such as jaxpipe.schedules.gpipe."
        )
    check_function(maker, "schedule", ("num_devices", "num_microbatches"))
    return (cast(ScheduleMaker, maker),)
