"""Readers of JSON that anybody may have written: what comes out is a value or an error of jaxpipe."""

import dataclasses
import io
import json
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from jaxpipe import Network, Plan, Profile
from jaxpipe.errors import JaxpipeError, PartitionError
from jaxpipe.plan import BalanceRound, HostPlan, StagePlan, StashPiece
from jaxpipe.planning import Partition, partition_layers
from jaxpipe.text import checked_json


PROFILE = Profile.chain(["conv", "relu", "dense"], [1e-3, 1e-4, 2e-3], [2e-3] * 3, [36, 0, 40], [8, 8, 8], [16, 4])
NETWORK = Network([[0, 1e9], [1e9, 0]], 1e-6, (1.0, 0.5), (8e9, float("inf")), ("a", "b"))
STAGE = StagePlan((0, 2), (0,), ("conv",), 1e-3, 2e-3, 36, 8, 2, 16, 1, 3, (StashPiece(1, (1,), 8),), {"keep": 8})
PLAN = Plan(
    (STAGE,),
    1,
    4,
    8,
    "1f1b",
    "analytic",
    0.1,
    0.05,
    0.2,
    4096,
    {"parameters": 36, "gradients": 36},
    "abc",
    (BalanceRound((1,), (3e-3, 2e-3), 0.1),),
    exchange_bytes=12,
    staleness=(1,),
    host=HostPlan(4096, 1024),
)
PARTITION = partition_layers(PROFILE, NETWORK, num_stages=2, replicate=False, num_microbatches=4)
VALUES = {"Plan": PLAN, "Profile": PROFILE, "Network": NETWORK, "Partition": PARTITION}

#: Short names that valid texts have, so that random objects get past the first check.
WORDS = ["stages", "memory", "operators", "edges", "devices", "bandwidth_bytes_per_second", "order", "profile", "names"]
NUMBERS = st.integers() | st.floats() | st.sampled_from([0, -1, 2**63, 10**400, 1e308, -0.0])
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS) | st.text(), inner, max_size=4),
    max_leaves=12,
)


def places(value, path=()):
    """All places in a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def mutated(data, draw):
    """A copy with something else in one place, or without it."""
    data = json.loads(json.dumps(data))
    *path, last = draw(st.sampled_from([p for p in places(data) if p]))
    inner = data
    for key in path:
        inner = inner[key]
    if draw(st.booleans()):
        inner[last] = draw(ANYTHING)
    else:
        del inner[last]
    return data


def assert_reads_or_refuses(kind, text):
    """Anything that can be read can also be shown and written; every failure has a named error with a text."""
    try:
        value = type(VALUES[kind]).from_json(text)
    except JaxpipeError as error:
        assert str(error)
    else:
        assert str(value) and type(value).from_json(value.to_json()) == value


@pytest.mark.parametrize("kind", VALUES)
def test_what_is_written_is_read(kind):
    assert type(VALUES[kind]).from_json(VALUES[kind].to_json()) == VALUES[kind]


@pytest.mark.parametrize("stages", [[], None])
def test_a_plan_has_stages_and_they_have_devices(stages):
    value = json.loads(VALUES["Plan"].to_json())
    value["stages"] = [{**stage, "devices": []} for stage in value["stages"]] if stages is None else stages
    with pytest.raises(PartitionError, match="every stage must have a device"):
        type(VALUES["Plan"]).from_json(json.dumps(value))


@pytest.mark.parametrize("kind", VALUES)
@given(value=ANYTHING)
@settings(max_examples=60, deadline=None)
def test_random_values(kind, value):
    assert_reads_or_refuses(kind, json.dumps(value))


@pytest.mark.parametrize("kind", VALUES)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_valid_texts_with_a_mutation(kind, data):
    value = json.loads(VALUES[kind].to_json())
    for _ in range(data.draw(st.integers(1, 2))):
        value = mutated(value, data.draw)
    assert_reads_or_refuses(kind, json.dumps(value))


@pytest.mark.parametrize("kind", VALUES)
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_texts_that_are_cut_or_changed(kind, data):
    text = VALUES[kind].to_json()
    start = data.draw(st.integers(0, len(text) - 1))
    assert_reads_or_refuses(
        kind, text[:start] + data.draw(st.text(max_size=3)) + text[start + data.draw(st.integers(0, 9)) :]
    )


HOSTILE = {
    "deep lists": "[" * 200_000,
    "deep objects": '{"a":' * 200_000,
    "a long number": '{"replicas": ' + "9" * 10_000 + "}",
    "not a number": '{"step_seconds": NaN}',
    "infinity": '{"step_seconds": -Infinity}',
    "a list": "[]",
    "nothing": "",
    "half a pair": '{"schedule": "\\ud800"}',
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_texts(kind, text):
    with pytest.raises(JaxpipeError):
        type(VALUES[kind]).from_json(text)


def test_long_texts_are_refused_before_they_are_parsed(monkeypatch):
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("parsed"))
    with pytest.raises(PartitionError, match="at most 16,777,216 are read"):
        Plan.from_json(" " * (checked_json.MOST_CHARACTERS + 1))


def listed(item, count):
    return "[" + ",".join([item] * count) + "]"


MANY = {
    "a network of 2,800 devices": ("Network", f'{{"bandwidth_bytes_per_second": {listed(listed("1", 2800), 2800)}}}'),
    "2 million edges": ("Profile", f'{{"operators": [], "edges": {listed("[0,1,1]", 2_000_000)}}}'),
    "3 million groups": ("Profile", f'{{"operators": [], "edges": [], "together": {listed("[0]", 3_000_000)}}}'),
    "150,000 operators": ("Profile", f'{{"operators": {listed("{" + ",".join(["1"] * 5) + "}", 150_000)}}}'),
    "8 million numbers": ("Plan", f'{{"staleness": {listed("0", 8_000_000)}}}'),
    "an order of 8 million": ("Partition", f'{{"order": {listed("0", 8_000_000)}}}'),
}


@pytest.mark.parametrize(("kind", "text"), MANY.values(), ids=MANY)
def test_texts_of_many_values_are_refused_before_they_are_parsed(kind, text, monkeypatch):
    """All are shorter than 16 Mi; parsed, they took up to 20 s and 1.1 GiB."""
    assert len(text) <= 16 * 2**20
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("parsed"))
    with pytest.raises(JaxpipeError, match="commas and opening brackets; at most 600,000 are read"):
        type(VALUES[kind]).from_json(text)


def test_networks_of_512_devices_are_read():
    network = Network.uniform(512, 123456789.123, 1e-6)
    assert Network.from_json(network.to_json()) == network


#: Names as a file may have them, and as a terminal and rich must show them.
HOSTILE_NAMES = {
    "a tag that closes nothing": ("[/x]", "[/x]"),
    "a link": ("[link=http://x]a[/link]", "[link=http://x]a[/link]"),
    "an action": ("[@click=app.bell]a[/]", "[@click=app.bell]a[/]"),
    "an emoji": (":bomb:", ":bomb:"),
    "a color": ("\x1b[31mred", r"\x1b[31mred"),
    "a title": ("\x1b]0;x\x07", r"\x1b]0;x\x07"),
    "backspaces": ("ab\x08\x08", r"ab\x08\x08"),
    "text from right to left": ("\u202egnp", r"\u202egnp"),
}


def hostile(kind, name):
    """A value of a kind that has a name wherever it has texts, and its text."""
    data = json.loads(VALUES[kind].to_json())
    if kind == "Plan":
        data["schedule"] = data["profile"] = data["stages"][0]["modules"][0] = name
        data["memory"][name] = 1
    elif kind == "Network":
        data["devices"][0]["name"] = name
    else:
        data["searched"] = data["cost_model"] = data["network"]["devices"][0]["name"] = name
        data["profile"]["operators"][0]["names"] = f"{name} dot"
    return type(VALUES[kind]).from_json(json.dumps(data))


@pytest.mark.parametrize("kind", ["Plan", "Network", "Partition"])
@pytest.mark.parametrize(("name", "shown"), HOSTILE_NAMES.values(), ids=HOSTILE_NAMES)
def test_names_are_shown_as_they_are(kind, name, shown):
    value = hostile(kind, name)
    on_terminal, elsewhere = (Console(file=io.StringIO(), width=400, force_terminal=t) for t in (True, False))
    on_terminal.print(value)
    elsewhere.print(value)
    text = "".join(str(value).replace("\u2026", "").split())
    assert shown[:6] in text  # long ones are broken, or shortened
    assert shown in elsewhere.file.getvalue() or kind == "Network"
    for output in (text, elsewhere.file.getvalue()):
        assert all(c.isprintable() or c == "\n" for c in output)
    # On a terminal rich writes its own colors, and nothing that the name asks for.
    for command in ("\x1b[31m", "\x1b]", "\x08", "\x07", "\u202e"):
        assert command not in on_terminal.file.getvalue()
    html = getattr(value, "_repr_html_", str)()
    assert "\x1b" not in html and "\u202e" not in html


NEGATIVE = {
    "replicas": "Expected `int` >= 1 - at `$.replicas`",
    "num_microbatches": "Expected `int` >= 1 - at `$.num_microbatches`",
    "microbatch_size": "Expected `int` >= 1 - at `$.microbatch_size`",
    "step_seconds": "Expected `float` >= 0.0 - at `$.step_seconds`",
    "budget": "Expected `int` >= 0 - at `$.budget`",
    "exchange_bytes": "Expected `int` >= 0 - at `$.exchange_bytes`",
    "memory parameters": "Expected `int` >= 0 - at `$.memory[...]`",
    "staleness 0": "Expected `int` >= 0 - at `$.staleness[0]`",
    "host bytes": "Expected `int` >= 0 - at `$.host.bytes`",
    "stages 0 devices 0": "Expected `int` >= 0 - at `$.stages[0].devices[0]`",
    "stages 0 forward_seconds": "Expected `float` >= 0.0 - at `$.stages[0].forward_seconds`",
    "stages 0 stash_bytes": "Expected `int` >= 0 - at `$.stages[0].stash_bytes`",
    "stages 0 pieces 0 devices 0": "Expected `int` >= 0 - at `$.stages[0].pieces[0].devices[0]`",
    "stages 0 pieces 0 bytes": "Expected `int` >= 0 - at `$.stages[0].pieces[0].bytes`",
}


@pytest.mark.parametrize(("place", "message"), NEGATIVE.items(), ids=NEGATIVE)
def test_plans_with_negative_numbers_are_refused(place, message):
    data = json.loads(PLAN.to_json())
    *path, last = (int(key) if key.isdecimal() else key for key in place.split())
    inner = data
    for key in path:
        inner = inner[key]
    inner[last] = -1
    with pytest.raises(PartitionError, match=re.escape(message)):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize("name", ["num_microbatches", "microbatch_size"])
def test_plans_of_nothing_are_refused(name):
    data = {**json.loads(PLAN.to_json()), name: 0}
    with pytest.raises(PartitionError, match=rf"`int` >= 1 - at `\$\.{name}`"):
        Plan.from_json(json.dumps(data))


def test_partitions_with_negative_numbers_are_refused():
    data = json.loads(PARTITION.to_json())
    data["stages"][1]["compute_seconds"] = -0.5
    with pytest.raises(PartitionError, match=r"`float` >= 0.0 - at `\$\.stages\[1\]\.compute_seconds`"):
        Partition.from_json(json.dumps(data))


@pytest.mark.parametrize("value", [1e308, 2.0**63, math.inf, math.nan, -1.0])
def test_numbers_whose_sums_overflow_are_refused(value):
    """A plan of such a profile would have infinities, which its own JSON cannot."""
    with pytest.raises(PartitionError, match="must be a finite number that is not negative, below"):
        dataclasses.replace(PROFILE, parameter_bytes=(value, 0.0, 0.0))


@pytest.mark.parametrize("cost_model", ["synchronous", "min_max", "throughput", "pipedream"])
def test_plans_of_the_largest_numbers_are_read_again(cost_model):
    largest = [9e18] * 3
    profile = Profile.chain(["a", "b", "c"], largest, largest, largest, largest, largest)
    latency = 9e18 if cost_model in ("synchronous", "min_max") else 0.0
    slow = Network([[0, 2.0**-63], [2.0**-63, 0]], latency, (2.0**-63, 2.0**-63))
    options = {"cost_model": cost_model, "num_microbatches": 4 if cost_model in ("synchronous", "throughput") else None}
    partition = partition_layers(profile, slow, num_stages=2, replicate=False, **options)
    assert "Infinity" not in partition.to_json()
    assert Partition.from_json(partition.to_json()) == partition


def test_an_object_has_each_name_once():
    with pytest.raises(PartitionError, match="an object has 'replicas' twice"):
        Plan.from_json(PLAN.to_json().replace('"replicas": 1', '"replicas": 2, "replicas": 1'))


@pytest.mark.parametrize("where", ["modules", "memory"])
def test_halves_of_surrogate_pairs_are_refused(where):
    data = json.loads(PLAN.to_json())
    if where == "modules":
        data["stages"][0]["modules"] = ["a\ud800"]
    else:
        data["memory"]["a\ud800"] = 1
    with pytest.raises(PartitionError, match="surrogate pair"):
        Plan.from_json(json.dumps(data))


def test_a_long_range_takes_no_memory():
    data = json.loads(PARTITION.to_json())
    data["stages"][0]["operators"] = [0, 2**62]
    with pytest.raises(PartitionError, match=r"stages\[0\].operators"):
        Partition.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("kind", "old", "new", "error", "message"),
    [
        ("Plan", '"replicas": 1', '"replicas": "1"', PartitionError, r"Expected `int`, got `str` - at `\$\.replicas`"),
        ("Plan", '"replicas": 1,', "", PartitionError, "missing required field `replicas`"),
        ("Plan", '"replicas": 1', '"replicas": 1, "copies": 1', PartitionError, "unknown field 'copies' at"),
        (
            "Plan",
            '"in_flight": 2',
            '"in_flight": true',
            PartitionError,
            r"got `bool` - at `\$\.stages\[0\]\.in_flight`",
        ),
        (
            "Plan",
            '"budget": 4096',
            '"budget": [4096]',
            PartitionError,
            r"Expected `int \| null`, got `array` - at `\$\.budget`",
        ),
        (
            "Profile",
            '"forward_seconds": 0.002',
            '"forward_seconds": -1',
            PartitionError,
            r"forward_seconds\[2\] \(dense",
        ),
        ("Profile", "[0, 1, 16.0, 0]", "[0, 1]", PartitionError, r"`array` of length 3 to 4 - at `\$\.edges\[0\]`"),
        ("Network", '"speed": 0.5', '"speed": 1e999', PartitionError, r"out of range - at `\$\.devices\[1\]\.speed`"),
        ("Partition", '"order": [\n  0,', '"order": [\n  1,', PartitionError, "each of 3 operators once"),
        ("Partition", '"num_stages": 2', '"num_stages": 2.5', PartitionError, r"got `float` - at `\$\.num_stages`"),
    ],
)
def test_errors_name_the_place(kind, old, new, error, message):
    text = VALUES[kind].to_json()
    assert old in text
    with pytest.raises(error, match=message):
        type(VALUES[kind]).from_json(text.replace(old, new, 1))
