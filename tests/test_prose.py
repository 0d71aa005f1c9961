"""Names between backticks in README and docs exist: attributes, arguments, options of commands, schedules."""

import ast
import builtins
import dataclasses
import functools
import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path

import flax.linen as nn
import jax
import optax
import pytest
from flax import nnx

import jaxpipe
from jaxpipe.models.linen_facade import LinenModel
from jaxpipe.planning.check_request import schedule_makers
from jaxpipe.schedules import BY_NAME


ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

#: What begins a name in prose, and what has its attributes: one of several.
ROOTS = {
    "checkpointer": (jaxpipe.Checkpointer,),
    "functools": (functools,),
    "jax": (jax,),
    "jaxpipe": (jaxpipe,),
    "model": (LinenModel, nnx.Module),
    "module": (nn.Module,),
    "network": (jaxpipe.Network,),
    "nn": (nn,),
    "nnx": (nnx,),
    "optax": (optax,),
    "pipeline": (jaxpipe.Pipeline,),
    "plan": (jaxpipe.Plan,),
    "report": (jaxpipe.ResidualReport,),
    "schedule": (jaxpipe.Schedule,),
    "self": (nn.Module,),
    "state": (jaxpipe.TrainState,),
    "timeline": (jaxpipe.schedules.Timeline,),
}
ROOTS |= {name: (getattr(jaxpipe, name),) for name in jaxpipe.__all__ if not name.startswith("_")}

#: Functions, methods and settings that pages name without their owners, and that are not ours.
OTHERS = {"loss_fn", "apply", "BatchNorm", "f", "fold_in", "fork", "get_state", "has_rng", "split", "PartitionSpec"}
OTHER_SETTINGS = {"dtype", "param_dtype", "out_sharding", "in_shardings"}


def parameters(function):
    """The parameters of a function or a class; None if it says nothing of them."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


def ours():
    """All public functions and classes, and public methods, by name."""
    names = {}
    for owner in (jaxpipe, jaxpipe.planning, jaxpipe.schedules, jaxpipe.gradients, jaxpipe.checkpoint):
        for name in dir(owner):
            value = getattr(owner, name)
            if not name.startswith("_") and callable(value):
                names.setdefault(name, []).append(value)
                members = inspect.getmembers(value, callable) if inspect.isclass(value) else []
                for method, function in members:
                    if not method.startswith("_"):
                        names.setdefault(method, []).append(function)
    return names


OURS = ours()
SETTINGS = OTHER_SETTINGS | {
    name
    for values in OURS.values()
    for value in values
    if str(getattr(value, "__module__", "")).startswith("jaxpipe")
    for name in parameters(value) or ()
}


def without_code(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def quoted(page):
    """The texts between backticks on a page, those in code blocks left out."""
    return sorted(set(re.findall(r"`([^`]+)`", without_code(page.read_text()))))


def member(owner, name):
    """The attribute of a module or class; of a property or a field its type. LookupError if there is none."""
    value = inspect.getattr_static(owner, name, None) if inspect.isclass(owner) else getattr(owner, name, None)
    getter = getattr(value, "fget", None) or getattr(value, "func", None)
    if isinstance(value, property | functools.cached_property) and getter is not None:
        return typing.get_type_hints(getter).get("return")
    if value is not None:
        return getattr(owner, name)
    hints = typing.get_type_hints(owner) if dataclasses.is_dataclass(owner) else {}
    if name not in hints and not (hasattr(owner, name) or name in _set_in_init(owner)):
        raise LookupError(name)
    return hints.get(name)


def _set_in_init(owner):
    """Attributes of a class without fields."""
    if dataclasses.is_dataclass(owner) or not str(getattr(owner, "__module__", "")).startswith("jaxpipe."):
        return []
    return re.findall(r"self\.(\w+)(?:: [^=]+)? = ", inspect.getsource(owner.__init__))


def resolve(node):
    """What a dotted name stands for; None if that is not known, LookupError if it does not exist."""
    chain = []
    while isinstance(node, ast.Attribute):
        chain.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in ROOTS:
        return None
    errors = []
    for value in ROOTS[node.id]:
        try:
            for name in reversed(chain):
                value = None if value is None else member(value, name)
            return value
        except LookupError as error:
            errors.append(error)
    raise errors[0]


def parsed(text):
    """A quoted text as Python; None if it is none. ``f(x=)`` names an argument, ``x=`` a setting."""
    text = re.sub(r"(?<![=<>!])=(?=\s*(?:[,)]|$))", "=None", text.removeprefix("@").removeprefix("with ").rstrip(":"))
    try:
        return ast.parse(text)
    except SyntaxError:
        return None


def wrong_names(text):
    """What a quoted text names that does not exist."""
    tree = parsed(text)
    if tree is None or re.search(r"\.(html|json)$", text):
        return []
    wrong = []
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) or (isinstance(node, ast.Name) and re.search(r"(Error|Warning)$", node.id)):
            try:
                value = resolve(node) if isinstance(node, ast.Attribute) else getattr(jaxpipe, node.id)
            except (LookupError, AttributeError):
                wrong.append(ast.unparse(node))
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else None
            if name in ROOTS and inspect.isclass(ROOTS[name][0]) and name.islower():
                continue  # an instance, called
            if name is not None and name not in OURS and name not in OTHERS and not hasattr(builtins, name):
                wrong.append(name)
            try:
                value = resolve(node.func)
            except LookupError:
                continue
            functions = [value] if value is not None else OURS.get(name or "", [])
            given = {keyword.arg for keyword in node.keywords if keyword.arg}
            known = [found for f in functions if (found := parameters(f)) is not None]
            if known and not any(_takes(found, given) for found in known):
                wrong.append(ast.unparse(node))
    for node in tree.body:
        if isinstance(node, ast.Assign) and not called and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            wrong += [f"{name}="] if "=" in text and " = " not in text and name not in SETTINGS else []
    return wrong


def _takes(known, given):
    return given <= set(known) or any(p.kind is p.VAR_KEYWORD for p in known.values())


@pytest.mark.core
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_in_prose_exist(page):
    assert {text: wrong for text in quoted(page) if (wrong := wrong_names(text))} == {}


@pytest.mark.core
def test_names_that_do_not_exist_are_found():
    for text in (
        "schedule.to_csv()",
        "Schedule.from_csv(text)",
        "jaxpipe.no_such",
        "pipeline.plan.no_such",
        "PlanOptions(no_such=)",
        "partition(memroy=)",
        "pipeline.timeline(mesured=True)",
        "memroy=",
        "no_such()",
        "NoSuchError",
        "jax.no_such",
    ):
        assert wrong_names(text), text
    for text in (
        "schedules.to_csv(schedule)",
        "pipeline.plan.step_seconds",
        "PlanOptions(solver=)",
        "state.step",
        "network.host_bandwidth_bytes_per_second",
        "nnx.Rngs",
        "model.make_rng(name)",
        "model.eval()",
        "@jaxpipe.memory_encoded",
        "jaxpipe.Sum(...)",
    ):
        assert not wrong_names(text), text


# Schedules


@pytest.mark.core
def test_schedules_that_pages_name_are_taken():
    (table,) = re.findall(
        r"^\| name \| table \|\n(.*?)\n\n", (ROOT / "docs/schedules.md").read_text(), re.DOTALL | re.MULTILINE
    )
    listed = {name for line in table.splitlines() for name in re.findall(r'`"(\w+)"`', line.split("|")[1])}
    assert listed == set(BY_NAME)
    text = "\n".join(page.read_text() for page in PAGES)
    for name in listed | set(re.findall(r'schedule="([^"]+)"', text)) | set(re.findall(r"--schedule (\w+)", text)):
        assert schedule_makers(name), name


# Command lines


def commands():
    """Command lines of all pages: those between backticks, and the lines of console blocks."""
    for page in PAGES:
        blocks = re.findall(r"^```console\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        for line in [*quoted(page), *(line.partition("#")[0] for block in blocks for line in block.splitlines())]:
            if " --" in line or line.startswith("jaxpipe "):
                yield line.strip()


@functools.cache
def help_of(command):
    """The help that a command of ours prints, or the file that reads its options."""
    if command[0] == "jaxpipe":
        code = f"import sys; from jaxpipe.cli import main; sys.exit(main({[*command[1:], '--help']!r}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return done.stdout
    path = ROOT / (command[0] if "/" in command[0] else f"{command[0].replace('.', '/')}.py")
    return path.read_text().replace("_", "-")


def test_options_of_commands_exist():
    checked = 0
    for line in set(commands()):
        words = line.removeprefix("python -m ").removeprefix("python ").split()
        command = tuple(words[:2]) if words[0] == "jaxpipe" else (words[0],)
        if not re.match(r"jaxpipe$|scripts[./]|examples[./]", words[0]):
            continue
        for option in re.findall(r"(?<!\S)--([\w-]+)", line):
            checked += 1
            text = help_of(command)
            assert f"--{option}" in text or re.search(rf"^    {option}:", text, re.MULTILINE), line
    assert checked > 10
