"""``PlanOptions``: settings of ``partition`` that few need."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxpipe.errors import PartitionError


#: Pairs of a logical axis and the axes of a mesh that it stands for, or None; of several for one, the first that fits.
AxisRules = Sequence[tuple[str, Any]]


class Solver(Protocol):
    """A solver of one's own for ``PlanOptions(solver=)``."""

    def solve(self, problem: Any, *, time_limit: float, gap: float) -> object:
        """Solve a ``cvxpy.Problem`` with boolean variables, as ``problem.solve(...)`` does."""


@dataclass(frozen=True)
class PlanOptions:
    """Hold the settings of ``partition`` that few need.

    Attributes:
      stage_axis, data_axis: names of the mesh axes of stages and of replicas, if they are none of the usual ones.
      devices_per_stage: how many devices of the axis of stages each stage has: one (False), a number for all, or one
        for each stage that add up to all devices, as ``(3, 1)``. True: as many stages and as many devices in each as
        make the step the shortest, by prediction. Micro-batch j goes to device j mod k of a stage with k devices, the
        schedule is a table of such rounds (``jaxpipe.schedules.replicas``), and gradients are added up within each
        stage.
      shardings: by name of a variable, or a pattern with ``*``, the partition spec of its dimensions over the mesh axes
        beside those two. It counts instead of the model's own annotations; the first pattern that fits does.
      axis_rules: the mesh axes that logical ones of the model stand for, as ``flax.linen.logical_axis_rules`` takes
        them; left out: the rules in whose context ``partition`` is called.
      batch_axes: mesh axes over which the examples of a micro-batch are split within a stage; left out: ``fsdp``, if
        the mesh has such an axis.
      axis_name: what the model or the loss call the axis of replicas, as ``jax.pmap(axis_name="batch")``: collectives
        over it (``BatchNorm(axis_name="batch")``, ``jax.lax.pmean(x, "batch")``) are over all replicas' parts of a
        micro-batch. Over other names that nothing binds, and if this is left out, a micro-batch of one replica is by
        itself. Replicas then add up their gradients in every micro-batch, not once in a step.
      zero: 1 splits the optimizer state over the replicas of the axis ``data`` (ZeRO-1; Rajbhandari et al., 2020);
        without replicas it changes nothing.
      host_memory: most bytes of its host's memory that each device may keep stashes in, as ``memory``; used where that
        makes a step within ``memory`` shorter. Devices that have no memory of the kind ``pinned_host`` do without,
        and the plan says so. Stages with several devices each keep theirs on the device.
      allow_over_budget: raise ``memory`` by a tenth at a time if no plan keeps it; the plan tells.
      solver: a mixed-integer solver that cvxpy finds, used if there is a budget; or an object with a method
        ``solve(problem, *, time_limit, gap)`` that solves a ``cvxpy.Problem`` in so many seconds, up to so large a
        share of its value, and leaves values in its variables and a ``status``.
      time_limit: seconds that it may take for the whole plan: all stages, levels and schedules share them. Once they
        are used up, a greedy rule chooses, and the plan says so. Compilation and tracing are not counted. Left out:
        six times as long as tracing the model takes.
      compile: whether stage programs are compiled here, so that the plan tells the bytes that XLA reserves. The first
        ``step`` does not compile again then. With ``memory``, a smaller plan is made if XLA reserves more, and a budget
        that no plan keeps is refused. Left out: with ``memory``, and on GPUs also without, where predictions may be a
        tenth off. False: what is predicted counts, for plans on paper. ``Pipeline.compile`` makes up for it; without
        that, the first ``step`` refuses a plan for which XLA reserves more than ``memory``.
      on_nonfinite: what to do if the loss or a gradient is not finite. ``"skip"``: parameters, state and optimizer
        state stay as they are, and the metrics count it. ``"raise"``: so do they, and ``NonFiniteError`` says in which
        stage it began; each step then waits for its result. None: not looked at.
      unroll_scans: whether layers that are one ``scan`` over stacked parameters ``[layers, ...]`` may be in several
        stages. ``"auto"``: they are cut into groups, each of which is a scan, if the stage that has them all would be
        longer than others, and the plan says so; where they cannot be cut, it says why. A number: so many iterations
        stay together. ``True``: one each, which compiles slowest. ``False``: a scan is one operator, which no stage
        shares. A stage holds only its own layers' rows of the parameters, their gradients and optimizer state;
        ``Pipeline.parameters``, ``value_and_grad`` and checkpoints stack them again. Norms over a stacked parameter
        are sums of those of its groups, rounded otherwise.
      gradient_dtype: in which gradients are added up over micro-batches, stages and replicas, where that is wider than
        the type of their parameter; left out: float32. The mean is rounded once to the parameter's type, in which the
        optimizer gets it; ``gradients.master_weights`` gets it as it is. ``jnp.bfloat16`` saves 2 bytes for each
        bfloat16 parameter, and rounds every sum.
      fresh_profile: measure the operators again, with ``profile="measured"``, and keep that instead of what is kept of
        this program: after a measurement on a busy machine. The plan tells when its profile was measured.

    Raises:
      PartitionError: if a field has a value that is none of these.

    Example:
      >>> PlanOptions(shardings={"*/kernel": PartitionSpec(None, "model")}, zero=1).zero
      1
    """

    stage_axis: str | None = None
    data_axis: str | None = None
    devices_per_stage: bool | int | Sequence[int] = False
    shardings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    axis_rules: AxisRules = ()
    batch_axes: Sequence[str] | None = None
    axis_name: str | None = None
    zero: int = 0
    host_memory: int | str | None = None
    allow_over_budget: bool = False
    solver: str | Solver = "HIGHS"
    time_limit: float | None = None
    compile: bool | None = None
    on_nonfinite: Literal["raise", "skip"] | None = None
    unroll_scans: int | Literal["auto"] = "auto"
    gradient_dtype: DTypeLike | None = None
    fresh_profile: bool = False

    def __post_init__(self) -> None:
        rules, axes = self.axis_rules, self.batch_axes
        pairs = isinstance(rules, Sequence) and all(isinstance(x, Sequence) and len(x) == 2 for x in rules)
        names = isinstance(axes, Collection | None) and not isinstance(axes, str)
        for name, good, rule in (
            ("zero", self.zero in (0, 1), "0, or 1 for ZeRO-1; shardings= splits parameters over an axis such as fsdp"),
            ("shardings", isinstance(self.shardings, Mapping), "a mapping from names of variables to partition specs"),
            ("axis_rules", pairs, "pairs of a logical axis and axes of the mesh, such as [('embed', 'model')]"),
            ("batch_axes", names, "a sequence of names, such as ('fsdp',)"),
        ):
            if not good:
                raise PartitionError(f"PlanOptions({name}={getattr(self, name)!r}); it must be {rule}.")
        for name, spec in self.shardings.items():
            if not isinstance(spec, PartitionSpec):
                raise PartitionError(
                    f"PlanOptions(shardings={{{name!r}: {spec!r}}}); each value must be a jax.sharding.PartitionSpec."
                )
