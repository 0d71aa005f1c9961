"""The command ``jaxpipe``: explain, plan, profile and report from a shell, on any machine.

    jaxpipe explain my_training:step --args example_args --device H100
    jaxpipe plan my_model:task --devices 4 --memory 8GiB
    jaxpipe plan my_model:task --devices 4 --devices-per-stage 3 1 --unroll-scans True
    jaxpipe plan my_model:task --devices 4 --cuts Block_3 Block_6 head
    jaxpipe report my_model:task --devices 4 --output report.html
    jaxpipe profile my_model:task --device H100 --output profile.json
    jaxpipe convert-profile graph.txt --output profile.json

``my_model:task`` names a function in a module that can be imported from the current folder. It takes no arguments and
returns ``(model, batch, loss, optimizer)`` as ``jaxpipe.partition`` takes them; as a batch, shapes will do. The model
is traced, not run, on simulated CPU devices; only ``profile --source measured`` runs it, on the machine's own.
``explain`` takes one's own training step instead, and a function that returns its arguments.

``jaxpipe --version`` prints the version. Where stderr is no terminal, a line each ten seconds says what is being done.

Exit status: 0; 1 if there is no such plan or a file is wrong; 2 if the command line is.
"""

# JAX and what needs it are imported in functions, so that help comes at once.

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from jaxpipe._version import __version__
from jaxpipe.errors import JaxpipeError
from jaxpipe.text.printed import printable


try:
    import tyro
except ImportError:
    sys.exit("jaxpipe: the command needs tyro, which is not installed: pip install tyro")

if TYPE_CHECKING:
    import flax.linen as nn
    import optax
    from flax import nnx

    from jaxpipe.array_types import Device, PyTree
    from jaxpipe.models.bound_model import UserFunction
    from jaxpipe.pipeline import Pipeline

    Model = nn.Module | nnx.Module | Callable[..., PyTree]


class UsageError(JaxpipeError, ValueError):
    """Arguments that do not go together, or name nothing."""


#: ``module:function``.
Target = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODULE:FUNCTION")]


@dataclass(frozen=True)
class Job:
    """A model to plan, and the devices to plan it for.

    Attributes:
      model: a function that returns (model, batch, loss, optimizer).
      devices: how many there are; left out, as many as the network has.
      network: JSON file with the links between them.
      replicas: copies of the pipeline; the devices are shared among them.
      devices_per_stage: devices of each stage: one number for all, or one for each stage, as in 3 1; True, as the
        planner finds best.
      memory: most bytes on a device, such as 8GiB.
      host_memory: most bytes of its host's memory that each device may keep stashes in.
      num_microbatches: of each replica; left out, enough for a small bubble.
      schedule: name of a schedule, such as one_f_one_b or zero_bubble.
      cuts: names of modules at which stages begin, as a plan prints them; others are searched for.
      plan: JSON file of a plan, as --output writes it, which is taken as it is: nothing is searched for.
      unroll_scans: layers of a scan that stay together, where stages may be cut between the others; True, one each;
        False, all; auto, as the planner finds best.
      profile: JSON file with the cost of each operator; left out, it is estimated.
      device: kind of device to estimate for, such as H100; left out, a CPU core.
      fresh_profile: measure the operators on a CPU of this machine, even if a measurement is kept.
      gradient_dtype: in which gradients of narrower parameters are added up; left out, float32.
      time_limit: seconds that solvers may take for the whole plan, with --memory; by default six times those of
        tracing.
      compile: compile the step on simulated CPU devices, for the bytes that XLA reserves there, which --memory then
        limits, as PlanOptions(compile=True).
    """

    model: Target
    devices: int | None = None
    network: Path | None = None
    replicas: int = 1
    devices_per_stage: bool | int | tuple[int, ...] = False
    memory: str | None = None
    host_memory: str | None = None
    num_microbatches: int | None = None
    schedule: str = "auto"
    cuts: tuple[str, ...] = ()
    plan: Path | None = None
    unroll_scans: bool | int | Literal["auto"] = "auto"
    profile: Path | None = None
    device: str | None = None
    fresh_profile: bool = False
    gradient_dtype: str | None = None
    time_limit: float | None = None
    compile: bool = False


@dataclass(frozen=True)
class PlanCommand(Job):
    """Plan a model for devices that need not be here, and print the plan.

    Attributes:
      output: file for the plan as JSON.
    """

    output: Path | None = None

    def run(self) -> None:
        """Print a plan, and write it."""
        plan = planned(self).plan
        print(plan)
        if self.output is not None:
            self.output.write_text(plan.to_json(), encoding="utf-8")


@dataclass(frozen=True)
class ReportCommand(Job):
    """Write a page about a plan, with pictures, that a browser opens without a network.

    Attributes:
      output: the HTML file.
    """

    output: Path = Path("report.html")

    def run(self) -> None:
        """Write the page."""
        planned(self).report(self.output, compile=self.compile)
        print(f"wrote {self.output}")


@dataclass(frozen=True)
class ProfileCommand:
    """Find out what each operator of a model costs, as JSON.

    Attributes:
      model: a function that returns (model, batch, loss, optimizer).
      source: measured runs the operators on this machine's first device, analytic estimates them from peak rates.
      device: kind of device to estimate for, such as H100.
      num_microbatches: into how many the batch is cut, those of all replicas counted.
      unroll_scans: as for plan, but not auto.
      output: file; left out, standard output.
    """

    model: Target
    source: Literal["analytic", "measured"] = "analytic"
    device: str | None = None
    num_microbatches: int = 1
    unroll_scans: bool | int = False
    output: Path | None = None

    def run(self) -> None:
        """Profile a model."""
        from jaxpipe.costs.profile_model import profile_model
        from jaxpipe.targets.known import target_named

        if self.source == "analytic":
            simulate_devices(1)
        if self.device is not None:
            with _command_line():
                target_named(self.device)
        model, batch, loss, _ = load(self.model)
        options = {name: getattr(self, name) for name in ("source", "device", "num_microbatches", "unroll_scans")}
        _write(profile_model(model, batch, loss=loss, **options).to_json(), self.output)


@dataclass(frozen=True)
class ExplainCommand:
    """Explain the memory of your training step, and what would make it need less. It is compiled, not run.

    Attributes:
      step: the function that computes one training step, jitted or not.
      args: a function without arguments that returns the step's arguments as a tuple, in the same module or as
        module:function; it is traced, so that nothing is allocated.
      device: kind of device to compile for, such as H100, which need not be here, or cpu; left out, JAX's own.
      donate: positions of the arguments that the step donates, if it is not jitted already.
      output: file for the explanation as JSON.
    """

    step: Target
    args: str = "example_args"
    device: str | None = None
    donate: tuple[int, ...] = ()
    output: Path | None = None

    def run(self) -> None:
        """Print the explanation, and write it."""
        if self.device is not None:
            from jaxpipe.targets.known import variables_for

            for name, value in variables_for(self.device).items():  # before anything has looked for devices
                os.environ.setdefault(name, value)
        from jaxpipe.step.explain import explain
        from jaxpipe.step.step_arguments import shapes_made

        step = _named(self.step)
        target = self.args if ":" in self.args else f"{self.step.partition(':')[0]}:{self.args}"
        try:
            make_args = _named(target)
        except UsageError as error:
            text = f"{error} --args names a function without arguments that returns those of {self.step} as a tuple."
            raise UsageError(text) from error
        _check_call(f"--args {target} must name a function without arguments", make_args)
        args = shapes_made(make_args)
        if not isinstance(args, tuple):
            raise UsageError(f"{target} returned {type(args).__name__!r}; it must return the arguments as a tuple.")
        _check_call(f"{self.step} does not take the {len(args)} argument(s) that {target} returns", step, *args)
        if wrong := [k for k in self.donate if not 0 <= k < len(args)]:
            raise UsageError(f"--donate {wrong[0]}: {target} returns {len(args)} arguments, from 0 to {len(args) - 1}.")
        if self.output is not None and not self.output.absolute().parent.is_dir():
            raise UsageError(f"--output {self.output}: there is no folder {self.output.parent}. Make it before.")
        options = {"donate_argnums": self.donate} if self.donate else {}
        explanation = explain(step, *args, device=self.device, **options)
        print(explanation)
        if self.output is not None:
            self.output.write_text(explanation.to_json(), encoding="utf-8")


@dataclass(frozen=True)
class ConvertProfileCommand:
    """Convert a published profile graph of the PipeDream family to JSON.

    Attributes:
      graph: the text file.
      output: file; left out, standard output.
    """

    graph: Annotated[Path, tyro.conf.Positional]
    output: Path | None = None

    def run(self) -> None:
        """Convert the file."""
        from jaxpipe.costs.profile import Profile

        _write(Profile.from_pipedream(self.graph).to_json(), self.output)


COMMANDS = {
    "explain": ExplainCommand,
    "plan": PlanCommand,
    "profile": ProfileCommand,
    "report": ReportCommand,
    "convert-profile": ConvertProfileCommand,
}


#: Seconds between lines of progress in logs.
PROGRESS_SECONDS = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments[:1]) == ["--version"]:
        print(f"jaxpipe {__version__}")
        return 0
    try:
        _check_name(arguments)
        commands = Union[*(Annotated[kind, tyro.conf.subcommand(name)] for name, kind in COMMANDS.items())]
        command = tyro.cli(commands, prog="jaxpipe", description=__doc__, args=arguments)  # type: ignore[arg-type]
        from jaxpipe.text.progress import lines_each

        with lines_each(PROGRESS_SECONDS):
            command.run()
    except (JaxpipeError, OSError, UnicodeDecodeError, ImportError) as error:
        print(f"jaxpipe: {printable(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


def _check_name(arguments: Sequence[str]) -> None:
    name = next(iter(arguments), "--help")
    if name in COMMANDS or name.startswith("-"):
        return
    close = difflib.get_close_matches(name, COMMANDS, 1)
    meant = f"; did you mean {close[0]}?" if close else ";"
    raise UsageError(f"There is no command {name!r}{meant} The commands are {', '.join(COMMANDS)}.")


@contextlib.contextmanager
def _command_line() -> Iterator[None]:
    """Make errors inside, which are about what the command line says, errors of it."""
    try:
        yield
    except JaxpipeError as error:
        raise UsageError(str(error)) from error


def planned(job: Job) -> "Pipeline":
    """The pipeline of a job, on simulated devices.

    Raises:
      UsageError: if it does not say for which devices, or says it twice.
      JaxpipeError: as ``partition``.
    """
    import jax

    from jaxpipe.costs.network import Network
    from jaxpipe.costs.profile import Profile
    from jaxpipe.costs.profile_model import EstimateFor
    from jaxpipe.options import PlanOptions
    from jaxpipe.partition import partition
    from jaxpipe.planning.check_request import Request, check_request
    from jaxpipe.planning.given_plan import read_plan

    network = None if job.network is None else Network.from_json(job.network.read_text(encoding="utf-8"))
    count = job.devices if network is None else network.num_devices
    if count is None or count < 1 or job.devices not in (None, count):
        known = "" if network is None else f", and {job.network} has {count} devices"
        raise UsageError(f"--devices is {job.devices}{known}; pass --devices, or a file with --network.")
    if job.replicas < 1 or count % job.replicas:
        raise UsageError(f"--replicas {job.replicas} does not divide {count} devices.")
    if job.replicas > 1 and job.devices_per_stage is not False:
        raise UsageError(
            f"--replicas {job.replicas} copies the whole pipeline, --devices-per-stage gives its stages several "
            "devices; there can be one of the two."
        )
    if job.profile is not None and job.device is not None:
        raise UsageError("--profile has the costs of operators, so there is nothing to estimate for --device.")
    if job.fresh_profile and (job.profile is not None or job.device is not None):
        raise UsageError("--fresh-profile measures on this machine; leave out --profile and --device.")
    axes = {"data": job.replicas} if job.replicas > 1 else {}
    axes["stage"] = count // job.replicas
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), devices=simulate_devices(count)[:count])
    model, batch, loss, optimizer = load(job.model)

    given = "measured" if job.fresh_profile else "analytic" if job.device is None else EstimateFor(job.device)
    if job.profile is not None:
        given = Profile.from_json(job.profile.read_text(encoding="utf-8"))
    plan = read_plan(job.plan and job.plan.read_text(encoding="utf-8"))
    with _command_line():
        options = ("devices_per_stage", "host_memory", "unroll_scans", "gradient_dtype", "time_limit", "compile")
        arguments = {
            **{name: getattr(job, name) for name in ("memory", "num_microbatches", "schedule", "cuts")},
            "plan": plan,
            "loss": loss,
            "optimizer": optimizer,
            "profile": given,
            "network": network,
            "options": PlanOptions(**{name: getattr(job, name) for name in (*options, "fresh_profile")}),
        }
        check_request(Request(model=model, mesh=mesh, **arguments))
    return partition(model, mesh, batch, **arguments)


def simulate_devices(count: int) -> "list[Device]":
    """CPU devices that are only there to plan for; before anything else has looked for devices.

    Raises:
      UsageError: if JAX has been started with fewer.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")
    with contextlib.suppress(RuntimeError):  # devices were looked for: those that there are must do
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices()
    if len(devices) < count:
        raise UsageError(f"{count} devices are needed, but JAX was started with {len(devices)} before.")
    return devices


def load(target: str) -> "tuple[Model, PyTree, UserFunction, optax.GradientTransformation]":
    """Return the results of the function that ``module:function`` names.

    Raises:
      UsageError: if there is no such function, or it returns something else.
    """
    task = _named(target)()
    if not isinstance(task, tuple) or len(task) != 4:
        kind = f"{len(task)} values" if isinstance(task, tuple) else repr(type(task).__name__)
        raise UsageError(f"{target} returned {kind}; it must return (model, batch, loss, optimizer).")
    return task


def _named(target: str) -> Callable[..., Any]:
    """Return the function that ``module:function`` names, in a module that can be imported from here.

    Raises:
      UsageError: if the module or the function does not exist.
    """
    module, _, name = target.partition(":")
    if not module or not name or module.startswith("."):
        raise UsageError(f"{target!r} is not module:function, such as my_model:task.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"The module {module!r} of {target!r} cannot be imported: {error}.") from error
    function = getattr(imported, name, None)
    if not callable(function):
        raise UsageError(f"The module {module!r} has no function {name!r}.")
    return function


def _check_call(rule: str, function: Callable[..., Any], *args: Any) -> None:
    """Raise ``UsageError``, which tells the rule, if a function does not take so many arguments."""
    try:
        inspect.signature(function).bind(*args)
    except TypeError as error:
        raise UsageError(f"{rule}: {error}.") from error


def _write(text: str, output: Path | None) -> None:
    if output is None:
        print(text, end="")
    else:
        output.write_text(text, encoding="utf-8")
