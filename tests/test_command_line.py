"""The command as a shell sees it: what is printed, what is written, how it ends."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jaxpipe
from jaxpipe import cli
from jaxpipe.cli import main


TASK = """
import functools
import jax, jax.numpy as jnp, optax
from flax import linen as nn

class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = nn.relu(nn.Dense(16)(x))
        return x

def loss(model, batch):
    return (model(batch) ** 2).mean()

def task():
    return Net(), jax.ShapeDtypeStruct((32, 16), jnp.float32), loss, optax.sgd(0.1)

def layers(w, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

def scanned():
    return jax.tree_util.Partial(layers, jnp.ones((4, 16, 16))), *task()[1:]

def three():
    return 1, 2, 3

def step(params, batch):
    gradients = jax.grad(lambda p: (jnp.tanh(batch @ p) ** 2).sum())(params)
    return params - 0.1 * gradients

def example_args():
    return jnp.ones((16, 8)), jnp.ones((32, 16))

@functools.partial(jax.jit, static_argnums=(2, 3))
def chosen_step(params, batch, kind, plain):
    return params if plain else step(params, getattr(jnp, kind)(batch))

def static_args():
    return *example_args(), "tanh", False

def _split(*axes):
    return jax.sharding.NamedSharding(jax.make_mesh((4,), ("data",)), jax.sharding.PartitionSpec(*axes))

def sharded_shapes():
    shape = jax.ShapeDtypeStruct
    return shape((16, 8), jnp.float32, sharding=_split()), shape((32, 16), jnp.float32, sharding=_split("data"))

def sharded_arrays():
    return jax.device_put(jnp.ones((16, 8)), _split()), jax.device_put(jnp.ones((32, 16)), _split("data"))

_ARRAYS = sharded_arrays() if len(jax.devices()) > 3 else None

def global_arrays():
    return _ARRAYS

def one_array():
    return jnp.ones((16, 8))

def nothing_at_all():
    return ()

def one_step(step):
    return (step,)
"""

GRAPH = """node1 -- Input0 -- forward_compute_time=0, backward_compute_time=0, activation_size=0, parameter_size=0
node2 -- Linear(8, 8) -- forward_compute_time=1.5, backward_compute_time=3, activation_size=64, parameter_size=256
\tnode1 -- node2
"""

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "command_line_task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(cli, "PROGRESS_SECONDS", 600.0)  # what takes long here takes longer on a busy machine
    assert len(jax.devices()) == 8  # looked for before the command asks for fewer
    return tmp_path


def test_plan_prints_a_table_and_writes_json(folder, capsys):
    arguments = "plan command_line_task:task --devices 2 --num-microbatches 4 --schedule gpipe --output plan.json"
    assert main(arguments.split()) == 0
    plan = jaxpipe.Plan.from_json((folder / "plan.json").read_text())
    assert str(plan) in capsys.readouterr().out
    assert (len(plan.stages), plan.num_microbatches, plan.schedule, plan.profile) == (2, 4, "gpipe", "analytic")


def test_a_plan_with_cuts_of_the_caller_is_read_back_as_it_was_written(folder, capsys):
    arguments = ["plan", "command_line_task:task", "--devices", "2", "--num-microbatches", "4"]
    assert main([*arguments, "--cuts", "Dense_2", "--output", "plan.json"]) == 0
    assert "stages begin at 'Dense_2'" in capsys.readouterr().out
    assert main([*arguments, "--plan", "plan.json", "--output", "again.json"]) == 0
    assert (folder / "again.json").read_text() == (folder / "plan.json").read_text()
    assert main([*arguments, "--plan", "plan.json", "--cuts", "Dense_2"]) == 2
    assert "cuts= and plan= are both given" in capsys.readouterr().err


def test_plan_takes_a_network_and_a_kind_of_device(folder, capsys):
    network = jaxpipe.Network([[0, 1e9, 1e9], [1e9, 0, 1e9], [1e9, 1e9, 0]])
    (folder / "network.json").write_text(network.to_json())
    arguments = "plan command_line_task:task --network network.json --device H100 --memory 1MiB --output plan.json"
    assert main([*arguments.split(), "--host-memory", "2MiB"]) == 0
    plan = jaxpipe.Plan.from_json((folder / "plan.json").read_text())
    assert len(plan.stages) == 3 and plan.budget == 2**20
    assert plan.host.budget == 2**21 and not plan.host.refused
    assert plan.rates == "H100" and "at the rates of H100)" in capsys.readouterr().out
    # 16 x 16 products of a few examples take an H100 no time but that to start a kernel, 2 microseconds each. The
    # host takes 25 for each call and 40 for each send: 6 and 4 for a micro-batch.
    assert 2e-6 <= plan.stages[0].forward_seconds < 2e-5
    work = sum(stage.forward_seconds + stage.backward_seconds for stage in plan.stages)
    assert plan.step_seconds < (work + 6 * 25e-6 + 4 * 40e-6) * plan.num_microbatches


@pytest.mark.parametrize(("replicate", "widths"), [("3 1", (3, 1)), ("2", (2, 2)), ("False", (1, 1, 1, 1))])
def test_plan_gives_stages_several_devices(folder, capsys, replicate, widths):
    arguments = f"plan command_line_task:task --devices 4 --devices-per-stage {replicate} --output plan.json"
    assert main(arguments.split()) == 0
    plan = jaxpipe.Plan.from_json((folder / "plan.json").read_text())
    assert tuple(len(stage.devices) for stage in plan.stages) == widths


def test_the_planner_may_choose_how_many_devices_a_stage_has(folder, capsys):
    arguments = "plan command_line_task:task --devices 4 --devices-per-stage True --output plan.json"
    assert main(arguments.split()) == 0
    plan = jaxpipe.Plan.from_json((folder / "plan.json").read_text())
    assert sum(len(stage.devices) for stage in plan.stages) == 4


@pytest.mark.parametrize(("rows", "layers"), [("True", 4), ("2", 2)])
def test_scans_are_cut_between_their_layers(folder, capsys, rows, layers):
    """Each stage has as many layers as stay together at least, so that there are so many stages at most."""
    arguments = f"command_line_task:scanned --unroll-scans {rows} --num-microbatches 4"
    assert main(f"profile {arguments} --output profile.json".split()) == 0
    assert main(f"plan {arguments} --devices {layers} --profile profile.json --output plan.json".split()) == 0
    plan = jaxpipe.Plan.from_json((folder / "plan.json").read_text())
    assert [stage.parameter_bytes for stage in plan.stages] == [4 // layers * 16 * 16 * 4] * layers
    assert main(f"plan {arguments} --devices {layers} --device H100 --output plan.json".split()) == 0
    assert (
        jaxpipe.Plan.from_json((folder / "plan.json").read_text()).stages[-1].operators[1]
        == plan.stages[-1].operators[1]
    )


def test_scans_are_cut_for_a_kind_of_device_too(folder, capsys):
    arguments = "plan command_line_task:scanned --devices 2 --num-microbatches 4 --schedule gpipe --output plan.json"
    assert main([*arguments.split(), "--device", "H100"]) == 0
    plan = jaxpipe.Plan.from_json((folder / "plan.json").read_text())
    assert [stage.parameter_bytes for stage in plan.stages] == [2 * 16 * 16 * 4] * 2


def test_profile_is_what_profile_model_gives(folder, capsys):
    assert main(["profile", "command_line_task:task", "--device", "V100", "--num-microbatches", "2"]) == 0
    profile = jaxpipe.Profile.from_json(capsys.readouterr().out)
    assert profile.device_kind == "V100" and profile.forward_flops[0] == 2 * 16 * 16 * 16
    (folder / "profile.json").write_text(profile.to_json())
    arguments = "plan command_line_task:task --devices 2 --num-microbatches 2 --profile profile.json"
    assert main([*arguments.split(), "--schedule", "gpipe"]) == 0
    assert "2 stages, 2 micro-batches of 16, gpipe" in capsys.readouterr().out


def test_report_is_written(folder, capsys):
    arguments = "report command_line_task:task --devices 4 --replicas 2 --output report.html"
    assert main(arguments.split()) == 0
    text = (folder / "report.html").read_text()
    assert "2 stages x 2 replicas" in text and text.count("<img ") == 3
    assert "wrote report.html" in capsys.readouterr().out


def test_published_profiles_are_converted(folder, capsys):
    (folder / "graph.txt").write_text(GRAPH)
    assert main(["convert-profile", "graph.txt", "--output", "profile.json"]) == 0
    profile = jaxpipe.Profile.from_json((folder / "profile.json").read_text())
    assert profile.forward_seconds == (1.5e-3,) and profile.parameter_bytes == (256,)


@pytest.mark.parametrize(
    ("donate", "kept"), [("", 16 * 8 * 4), ("--args command_line_task:example_args --donate 0", 0)]
)
def test_explain_tells_the_use_of_memory(folder, capsys, donate, kept):
    arguments = f"explain command_line_task:step --device cpu --output explanation.json {donate}"
    assert main(arguments.split()) == 0
    assert "at the peak on cpu, a batch of 32, 2 products." in capsys.readouterr().out
    read = json.loads((folder / "explanation.json").read_text())
    causes = {part["cause"]: part["bytes"] for part in read["parts"]}
    assert (causes["parameters"], causes["batch"]) == (16 * 8 * 4, 32 * 16 * 4)
    assert causes.get("new state beside the old, as it is not donated", 0) == kept


@pytest.mark.parametrize("args", ["sharded_shapes", "global_arrays"])
def test_explain_counts_bytes_of_one_of_the_devices_that_arguments_name(folder, args):
    assert main(f"explain command_line_task:step --args {args} --output explanation.json".split()) == 0
    mesh = jax.make_mesh((4,), ("data",))
    weights, x = jax.numpy.ones((16, 8)), jax.numpy.ones((32, 16))
    split = [jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in ((), ("data",))]

    def step(params, batch):
        return params - 0.1 * jax.grad(lambda p: (jax.numpy.tanh(batch @ p) ** 2).sum())(params)

    sizes = jax.jit(step).lower(*map(jax.device_put, (weights, x), split)).compile().memory_analysis()
    expected = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
    assert json.loads((folder / "explanation.json").read_text())["total_bytes"] == expected


def test_explain_leaves_static_arguments_as_they_are(folder, capsys):
    assert main(["explain", "command_line_task:chosen_step", "--args", "static_args", "--device", "cpu"]) == 0
    assert "a batch of 32, 2 products." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("plan command_line_task:task", 2, "--devices is None"),
        ("plan command_line_task:task --devices 3 --replicas 2", 2, "--replicas 2 does not divide 3"),
        ("plan command_line_task:three --devices 2", 2, "returned 3 values"),
        ("plan command_line_task:nothing --devices 2", 2, "no function 'nothing'"),
        ("plan no_such_module:task --devices 2", 2, "'no_such_module' .* cannot be imported"),
        ("plan command_line_task --devices 2", 2, "is not module:function"),
        ("plan ../command_line_task:task --devices 2", 2, "is not module:function"),
        ("plan command_line_task:task --devices 99", 2, "99 devices are needed"),
        (
            "plan command_line_task:task --devices 4 --replicas 2 --devices-per-stage 2",
            2,
            "there can be one of the two",
        ),
        (
            "plan command_line_task:task --devices 4 --devices-per-stage 3 2",
            2,
            r"devices_per_stage=\(3, 2\).*add up to the 4 device",
        ),
        ("plan command_line_task:task --devices 2 --unroll-scans True", 1, "no scan over stacked parameters"),
        ("plan command_line_task:task --devices 2 --memory 1KiB", 1, "smallest budget"),
        ("plan command_line_task:task --devices 2 --schedule fast", 2, "schedule='fast'"),
        ("plan command_line_task:task --network missing.json", 1, "No such file"),
        ("plan command_line_task:task --network command_line_task.py", 1, "cannot be read: .*line 2"),
        ("plan command_line_task:task --devices 2 --cuts Dense_9", 1, "no module .Dense_9"),
        ("plan command_line_task:task --devices 2 --plan command_line_task.py", 1, "cannot be read: .*line 2"),
        ("plan command_line_task:task --devices 2 --memory much", 2, "memory='much' is not a size"),
        ("plan command_line_task:task --devices 2 --device TPU", 2, "peak rates are not known"),
        ("plan command_line_task:task --devices 2 --gradient-dtype int8", 2, "gradient_dtype"),
        ("profile command_line_task:task --device TPU", 2, "peak rates are not known"),
        ("explain command_line_task:step --args nothing", 2, "no function 'nothing'. --args names a function"),
        ("explain command_line_task:step --args one_array", 2, "must return the arguments as a tuple"),
        (
            "explain command_line_task:step --args one_step",
            2,
            "one_step must name a function without arguments: missing",
        ),
        (
            "explain command_line_task:step --args nothing_at_all",
            2,
            ":step does not take the 0 argument.s. that .*: missing a",
        ),
        (
            "explain command_line_task:step --donate 5",
            2,
            "--donate 5: command_line_task:example_args returns . arguments",
        ),
        ("explain command_line_task:step --output no/folder.json", 2, "--output no/folder.json: there is no folder no"),
        ("explain command_line_task:step --args sharded_arrays", 1, "places arrays on several devices, which"),
        ("explain command_line_task:step --device H1000", 1, "device='H1000': no such device"),
        ("convert-profile command_line_task.py", 1, "command_line_task.py, line 2"),
    ],
)
def test_errors_are_one_line_and_a_status(folder, capsys, arguments, status, message):
    assert main(arguments.split()) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    first, *others = printed.err.splitlines()
    assert first.startswith("jaxpipe: ") and all(line.startswith("    ") for line in others)  # lines to write
    assert re.search(message, printed.err)


def test_command_needs_no_devices(folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("JAX_PLATFORMS", None)
    command = [sys.executable, "-m", "jaxpipe", "plan", "command_line_task:task", "--devices", "3"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "3 stages, " in done.stdout


def test_command_without_tyro_says_what_to_install(folder):
    (folder / "tyro.py").write_text("raise ImportError")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "jaxpipe", "plan"], capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("jaxpipe: ") and done.stderr.endswith("pip install tyro\n")


@pytest.mark.parametrize(
    ("name", "meant"), [("plann", "did you mean plan?"), ("report.html", "did you mean report?"), ("xyz", "")]
)
def test_unknown_commands_are_refused(capsys, name, meant):
    assert main([name, "command_line_task:task"]) == 2
    printed = capsys.readouterr()
    assert f"There is no command {name!r}; {meant}" in printed.err and printed.err.count("\n") == 1
    assert ("did you mean" in printed.err) == bool(meant) and printed.out == ""


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxpipe {jaxpipe.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["--version"], ["plann"]])
def test_help_does_not_wait_for_jax(arguments):
    script = (
        "import runpy, sys, time; sys.argv[1:] = sys.argv[2:]; sys.modules['jax'] = None; runpy.run_module('jaxpipe')"
    )
    command = [sys.executable, "-c", script, "-", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == (2 if arguments == ["plann"] else 0), done.stderr
    assert "Traceback" not in done.stderr


def test_a_plan_for_a_kind_of_device_is_made_once(folder, capsys, caplog):
    with caplog.at_level("INFO", "jaxpipe"):
        assert main(["plan", "command_line_task:task", "--devices", "2", "--device", "H100"]) == 0
    messages = [record.message for record in caplog.records if record.name == "jaxpipe"]
    assert messages.count("Tracing the model") == 1
    assert sum(message.endswith("operators, estimated for H100") for message in messages) == 1


def test_bytes_of_the_compiled_step_are_told(folder, capsys):
    assert main(["plan", "command_line_task:task", "--devices", "2", "--num-microbatches", "2", "--compile"]) == 0
    assert "compiled (" in capsys.readouterr().out
