"""What exchanges between replicas cost on a network: closed forms and timelines by hand."""

import itertools

import jax
import numpy as np
import pytest

from jaxpipe.costs.network import Network
from jaxpipe.errors import PartitionError
from jaxpipe.exchange_plan import ExchangePlan
from jaxpipe.gradients import block_sparse, outer_loop
from jaxpipe.planning import compare_exchanges
from jaxpipe.planning.exchange_costs import ExchangeCosts


pytestmark = pytest.mark.core

#: 4 layers of 12.5 MB, and 100 Mbit/s between sites.
PARAMS = {f"layer {k}": jax.ShapeDtypeStruct((1250, 2500), "float32") for k in range(4)}
SLOW = 12.5e6


def seconds(exchange, step_seconds=0.0, network=None):
    (row,) = compare_exchanges(PARAMS, {"it": exchange}, network or Network.uniform(2, SLOW), step_seconds).rows
    return row.seconds


@pytest.mark.parametrize(("replicas", "latency"), itertools.product([2, 4], [0.0, 0.25]))
def test_a_ring_in_closed_form(replicas, latency):
    """All-reduce: twice all but one of R parts; gather: what all others have."""
    network = Network.uniform(replicas, SLOW, latency)
    dense = 2 * (replicas - 1) * (50e6 / replicas / SLOW + latency)
    assert seconds("dense", network=network) == pytest.approx(dense)
    assert seconds(outer_loop(inner_steps=16), network=network) == pytest.approx(dense / 16)
    sent = 4 * 25 * (2 + 4 * 1250)  # of each layer 25 columns with their numbers
    gather = (replicas - 1) * (sent / SLOW + latency)
    blocks = block_sparse(k=25)
    assert seconds(blocks, network=network) == pytest.approx(gather)
    assert seconds(outer_loop(inner_steps=16, exchange=blocks), network=network) == pytest.approx(gather / 16)


def test_the_slowest_link_of_a_ring_decides():
    bandwidth = np.full((3, 3), 1e9)
    bandwidth[0, 2] = bandwidth[2, 0] = SLOW
    assert seconds("dense", network=Network(bandwidth)) == pytest.approx(4 * 50e6 / 3 / SLOW)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "step_seconds", "expected"),
    [
        # 4 s in all, once in 8 steps, whatever a step takes.
        ({"inner_steps": 8}, 1.0, 4 / 8),
        ({"inner_steps": 8, "fragments": 4}, 1.0, 4 / 8),
        # A fragment of 1 s has the whole next step.
        ({"inner_steps": 8, "fragments": 4, "delay": 1}, 1.0, 0.0),
        # Of 1 s a step of 0.25 s hides as much, a delay of two steps twice that.
        ({"inner_steps": 16, "fragments": 4, "delay": 1}, 0.25, 4 * 0.75 / 16),
        ({"inner_steps": 16, "fragments": 4, "delay": 2}, 0.25, 4 * 0.5 / 16),
        # The link is busy all the time: 4 s in a round, of which steps are 8 * 0.1 s.
        ({"inner_steps": 8, "fragments": 4, "delay": 7}, 0.1, (4 - 0.8) / 8),
        # All at once, hidden by 3 of 8 steps of 1 s.
        ({"inner_steps": 8, "delay": 3}, 1.0, 1 / 8),
    ],
)
def test_timelines_over_100_megabits(options, step_seconds, expected):
    assert seconds(outer_loop(**options), step_seconds) == pytest.approx(expected, abs=1e-9)


def test_the_table():
    exchanges = {"dense": "dense", "loop": outer_loop(inner_steps=16, exchange=block_sparse(k=1, bits=2))}
    table = compare_exchanges(PARAMS, exchanges, Network.uniform(2, SLOW))
    assert [row.bytes for row in table.rows] == [50e6, 4 * (2 + 4 + 313) / 16]
    lines = str(table).splitlines()
    assert lines[2].split() == ["dense", "47.68", "MiB", "4", "s"]
    assert lines[3].split() == ["loop", "80", "B", "6.38", "us", "4", "s", "626,959", "x"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sparse", Network.uniform(2, SLOW)), "'sparse'; each exchange must be 'dense'"),
        (("dense", Network.uniform(1, SLOW)), "a network of 1 device"),
        (("dense", Network.uniform(2, SLOW), -1.0), "the seconds may not be negative"),
        (("dense", Network([[0, 1e9, 0], [1e9, 0, 1e9], [0, 1e9, 0]])), "replicas without a link between them"),
    ],
)
def test_bad_arguments(arguments, message):
    exchange, *rest = arguments
    with pytest.raises(PartitionError, match=message):
        compare_exchanges(PARAMS, {"it": exchange}, *rest)


def test_what_costs_more_than_the_first_is_no_saving():
    rows = ExchangePlan("outer", 100.0, 0.015), ExchangePlan("dense", 400.0, 0.06), ExchangePlan("rare", 10.0, 0.005)
    cells = [line.split() for line in str(ExchangeCosts(rows)).splitlines()[-3:]]
    assert [row[-4:] for row in cells[1:]] == [["-45", "ms", "0.25", "x"], ["10", "ms", "10", "x"]]
