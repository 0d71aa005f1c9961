"""Networks: given, described, measured; against literal matrices and closed forms."""

import itertools
import math
import os
import socket
import subprocess
import sys
import warnings

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxpipe import Network, Node
from jaxpipe.costs import link_speed
from jaxpipe.costs.link_speed import best_seconds, fit_link
from jaxpipe.costs.topology import NVLINK_H100, PCIE_3_X16, PCIE_4_X16, PCIE_5_X16
from jaxpipe.errors import MemoryBudgetError, PartitionError


INF, NAN = math.inf, math.nan
PAIR = [[0, 1], [1, 0]]


def test_a_link_takes_latency_and_bytes_over_bandwidth():
    network = Network([[0, 2e9, 0], [2e9, 0, 4e9], [0, 4e9, 0]], [[0, 1e-3, 0], [1e-3, 0, 2e-3], [0, 2e-3, 0]])
    assert network.seconds(0, 1, 1e6) == pytest.approx(1.5e-3)
    assert network.seconds(2, 1, 1e6) == pytest.approx(2.25e-3)
    assert network.seconds(0, 2, 1) == INF
    assert network.seconds(1, 1, 1e6) == 0
    assert not network.is_uniform


def test_what_is_left_out():
    network = Network(PAIR)
    assert network.latency_seconds == ((0, 0), (0, 0))
    assert (network.speed, network.memory_bytes, network.names) == ((1, 1), (INF, INF), ("device 0", "device 1"))
    assert network.host_bandwidth_bytes_per_second == (PCIE_3_X16,) * 2 and network.host_latency_seconds == (0, 0)


def test_the_diagonal_is_not_used():
    assert Network([[NAN, 1], [1, INF]], [[-1, 2], [2, NAN]]) == Network(PAIR, 2)


def test_uniform():
    network = Network.uniform(3, 5e9, 1e-6)
    assert network.bandwidth_bytes_per_second == ((0, 5e9, 5e9), (5e9, 0, 5e9), (5e9, 5e9, 0))
    assert network.latency_seconds == ((0, 1e-6, 1e-6), (1e-6, 0, 1e-6), (1e-6, 1e-6, 0))
    assert network.is_uniform and Network.uniform(1, 1).is_uniform


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bandwidth_bytes_per_second": [[0, 1], [2, 0]]}, r"not symmetric: \[0\]\[1\] is 1, \[1\]\[0\] is 2"),
        ({"bandwidth_bytes_per_second": [[0, -3], [-3, 0]]}, r"holds -3 at \[0\]\[1\]"),
        ({"bandwidth_bytes_per_second": [[0, NAN], [NAN, 0]]}, r"holds nan at \[0\]\[1\]"),
        ({"bandwidth_bytes_per_second": [[0, INF], [INF, 0]]}, r"holds inf at \[0\]\[1\]"),
        ({"bandwidth_bytes_per_second": [[0, 1e308], [1e308, 0]]}, r"holds 1e\+308 at \[0\]\[1\]"),
        ({"bandwidth_bytes_per_second": [[0, 1e-300], [1e-300, 0]]}, r"holds 1e-300 at \[0\]\[1\]; .* 0, or between"),
        ({"speed": (1, 1e-300)}, r"speed is \(1.0, 1e-300\); it needs a positive number"),
        ({"bandwidth_bytes_per_second": [[0, 1, 0], [1, 0, 0], [0, 0, 9]]}, "Device 2 has no link: row 2"),
        ({"bandwidth_bytes_per_second": [[0, 1]]}, r"shape \(1, 2\)"),
        ({"bandwidth_bytes_per_second": 5.0}, r"shape \(\)"),
        ({"bandwidth_bytes_per_second": []}, r"shape \(0,\)"),
        ({"bandwidth_bytes_per_second": [[0, 1], [1]]}, "bandwidth_bytes_per_second must be a square matrix"),
        ({"bandwidth_bytes_per_second": [["fast"]]}, "bandwidth_bytes_per_second must be a square matrix"),
        ({"latency_seconds": [[0, 1], [2, 0]]}, r"latency_seconds is not symmetric: \[0\]\[1\] is 1"),
        ({"latency_seconds": -1e-6}, r"latency_seconds holds -1e-06 at \[0\]\[1\]"),
        ({"latency_seconds": np.zeros((3, 3))}, "latency_seconds is for 3 devices, the bandwidth for 2"),
        ({"speed": (1, 0)}, r"speed is \(1.0, 0.0\)"),
        ({"speed": (1, 1, 1)}, r"speed is \(1.0, 1.0, 1.0\); .* each of 2 devices"),
        ({"memory_bytes": (-1, 1)}, r"memory_bytes is \(-1.0, 1.0\)"),
        ({"names": ("a",)}, "names has 1 entries for 2 devices"),
        (
            {"host_bandwidth_bytes_per_second": (1, 0)},
            r"host_bandwidth_bytes_per_second is \(1.0, 0.0\); it needs a pos",
        ),
        ({"host_bandwidth_bytes_per_second": (1, INF)}, r"host_bandwidth_bytes_per_second is \(1.0, inf\)"),
        ({"host_latency_seconds": (1, -1)}, r"host_latency_seconds is \(1, -1\); .* each of 2 devices"),
        ({"host_latency_seconds": (1, 1, 1)}, r"host_latency_seconds is \(1, 1, 1\)"),
    ],
)
def test_invalid_networks_are_refused(arguments, message):
    with pytest.raises(PartitionError, match=message):
        Network(**{"bandwidth_bytes_per_second": PAIR, **arguments})


def test_uniform_needs_devices():
    with pytest.raises(PartitionError, match="num_devices=0"):
        Network.uniform(0, 1)


def test_json_round_trip():
    rest = ("a", "b", "c"), (4, 5, 6), (1e-6, 0, 0)
    network = Network([[0, 1, 3], [1, 0, 0], [3, 0, 0]], 1e-6, (1, 0.5, 2), (8, INF, 9), *rest)
    assert Network.from_json(network.to_json()) == network


def test_json_with_what_is_needed_only():
    assert Network.from_json('{"bandwidth_bytes_per_second": [[0, 1], [1, 0]]}') == Network(PAIR)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n "devices": [],\n nonsense', "line 3"),
        ("[]", "Expected `object`"),
        ('{"devices": []}', "bandwidth_bytes_per_second"),
        ('{"bandwidth_bytes_per_second": [[0, 1], [2, 0]]}', "not symmetric"),
    ],
)
def test_bad_json(text, message):
    with pytest.raises(PartitionError, match=message):
        Network.from_json(text)


def test_two_nodes():
    # Devices 0 and 1 have a direct link, 1 and 2 one that is slower than the shared path.
    first = Node(3, 12, 2, links={(1, 0): 50, (1, 2): 6}, speed=2, memory_bytes=(8, 16, 16), name="big")
    second = Node(2, 10, 3, name="", host_bandwidth_bytes_per_second=4)
    network = Network.from_nodes([first, second], 1.5, 7)
    assert network.bandwidth_bytes_per_second == (
        (0, 50, 12, 1.5, 1.5),
        (50, 0, 12, 1.5, 1.5),
        (12, 12, 0, 1.5, 1.5),
        (1.5, 1.5, 1.5, 0, 10),
        (1.5, 1.5, 1.5, 10, 0),
    )
    assert network.latency_seconds == (
        (0, 2, 2, 7, 7),
        (2, 0, 2, 7, 7),
        (2, 2, 0, 7, 7),
        (7, 7, 7, 0, 3),
        (7, 7, 7, 3, 0),
    )
    assert network.speed == (2, 2, 2, 1, 1)
    assert network.memory_bytes == (8, 16, 16, INF, INF)
    assert network.names == ("big/0", "big/1", "big/2", "node 1/0", "node 1/1")
    assert network.host_bandwidth_bytes_per_second == (PCIE_3_X16,) * 3 + (4, 4)


def test_nodes_with_different_links_between_them():
    between = [[9, 4, 0], [4, 9, 2], [0, 2, 9]]
    network = Network.from_nodes([Node(1), Node(2, 8, name="x"), Node(1, name="x")], between, np.array(between) / 2)
    assert network.bandwidth_bytes_per_second == ((0, 4, 4, 0), (4, 0, 8, 2), (4, 8, 0, 2), (0, 2, 2, 0))
    assert network.latency_seconds == ((0, 2, 2, 0), (2, 0, 0, 1), (2, 0, 0, 1), (0, 1, 1, 0))
    assert network.names == ("node 0/0", "x 1/0", "x 1/1", "x 2/0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": 0}, "devices=0"),
        ({"bandwidth_bytes_per_second": -2}, "bandwidth_bytes_per_second -2"),
        ({"latency_seconds": INF}, "latency_seconds inf"),
        ({"links": {(0, 2): 1}}, r"link \(0, 2\); .* devices of 0..1"),
        ({"links": {(1, 1): 1}}, r"link \(1, 1\)"),
        ({"links": {(0, 1, 2): 1}}, r"link \(0, 1, 2\)"),
        ({"links": {(0, 1): 1, (1, 0): 2}}, r"link \(0, 1\) twice"),
        ({"links": {(0, 1): -5}}, r"link \(0, 1\) with the bandwidth -5"),
        ({"speed": (1, 2, 3)}, r"speed of the shape \(3,\) for 2 devices"),
        ({"memory_bytes": ()}, r"memory_bytes of the shape \(0,\) for 2 devices"),
    ],
)
def test_bad_node(arguments, message):
    with pytest.raises(PartitionError, match=f"Node 'big' has .*{message}"):
        Node(**{"devices": 2, "name": "big", **arguments})


@pytest.mark.parametrize(
    ("nodes", "arguments", "message"),
    [
        ([], {}, "nodes is empty"),
        ([Node(2, 1)] * 2, {}, "Node 0 has no link: row 0 of the bandwidth between nodes is zero"),
        ([Node(2)], {}, "Device 0 has no link"),
        ([Node(1)] * 2, {"bandwidth_bytes_per_second": [[0, 1], [2, 0]]}, r"between nodes is not symmetric"),
        ([Node(1)] * 2, {"bandwidth_bytes_per_second": -4}, r"bandwidth between nodes holds -4 at \[0\]\[1\]"),
        ([Node(1)] * 3, {"bandwidth_bytes_per_second": PAIR}, "bandwidth between nodes is for 2 nodes; there are 3"),
        ([Node(1)] * 2, {"bandwidth_bytes_per_second": 1, "latency_seconds": -1}, "latency between nodes holds -1"),
        ([Node(1, speed=-1)] * 2, {"bandwidth_bytes_per_second": 1}, r"speed is \(-1.0, -1.0\)"),
    ],
)
def test_bad_nodes(nodes, arguments, message):
    with pytest.raises(PartitionError, match=message):
        Network.from_nodes(nodes, **arguments)


def test_nominal_rates():
    # GB/s of the data sheets: https://en.wikipedia.org/wiki/PCI_Express (x16), half of the H100's 900 GB/s.
    assert [round(rate / 1e9, 2) for rate in (PCIE_3_X16, PCIE_4_X16, PCIE_5_X16)] == [15.75, 31.51, 63.02]
    assert NVLINK_H100 == 900e9 / 2


def test_table_of_every_link():
    node = Node(2, 50e9, 8e-6, speed=2.5, memory_bytes=2**34, name="gpu")
    lines = str(Network.from_nodes([node, Node(1)], 1.25e9, 1234e-6)).splitlines()
    assert [line.split() for line in lines[4:]] == [
        ["0", "gpu/0", "2.5", "16.00", "GiB", "50", "1.25"],
        ["1", "gpu/1", "2.5", "16.00", "GiB", "8", "1.25"],
        ["2", "node", "1/0", "1", "no", "limit", "1234", "1234"],
    ]


def test_table_of_links_to_the_host():
    network = Network(np.array(PAIR) * 1e9, host_bandwidth_bytes_per_second=(2e9, 25e9))
    lines = str(network).splitlines()
    assert [line.split()[-3:] for line in lines[4:6]] == [["limit", "2", "1"], ["limit", "25", "0"]]
    assert "host GB/s" in lines[2]
    assert ", host 25 GB/s" not in str(Network.uniform(17, 1e9))
    assert "memory no limit, host 25 GB/s: 0-16" in str(
        Network(np.full((17, 17), 1e9), host_bandwidth_bytes_per_second=(25e9,) * 17)
    )


def test_table_shows_where_no_link_is():
    assert str(Network([[0, 1e9, 0], [1e9, 0, 1e9], [0, 1e9, 0]])).splitlines()[4].split()[-2:] == ["1", "-"]


def test_sixteen_devices_fit_into_the_table(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    cluster = Network.from_nodes([Node(4, PCIE_3_X16, 1e-5, memory_bytes=80e9)] * 4, 1.25e9, 4.5e-5)
    lines = str(cluster).splitlines()
    assert max(map(len, lines)) <= 120
    assert len(lines) == 4 + 16


def test_table_of_kinds():
    pair = Node(2, 50e9, 8e-6)
    text = str(Network.from_nodes([*[pair] * 8, Node(1, speed=0.5, memory_bytes=2**34)], 1.25e9, 3e-5))
    rows = [" ".join(line.split()) for line in text.splitlines()]
    # 17 devices: 8 pairs, and all other 17 * 16 / 2 - 8 links.
    assert "50 8 8 0-1, 2-3, 4-5, 6-7, 8-9, 10-11, ..." in rows
    assert "1.25 30 128 0-2, 0-3, 0-4, 0-5, 0-6, 0-7, ..." in rows
    assert "16 of speed 1 and memory no limit: 0-15" in text
    assert "1 of speed 0.5 and memory 16.00 GiB: 16" in text


@pytest.mark.parametrize("latency", [0, 2e-6, 1e-3])
@pytest.mark.parametrize("bandwidth", [1e8, 1.25e9, 3e11])
def test_fit_of_an_exact_link(latency, bandwidth):
    fitted = fit_link(link_speed.SIZES, [latency + n / bandwidth for n in link_speed.SIZES])
    assert fitted == pytest.approx((latency, bandwidth), rel=1e-9, abs=1e-15)


def test_small_messages_decide_the_latency():
    # 10 µs and 1 GB/s; the largest message took 20 % longer, which is 300 times the latency.
    sizes = link_speed.SIZES
    seconds = [1e-5 + n / 1e9 for n in sizes]
    seconds[-1] *= 1.2
    latency, bandwidth = fit_link(sizes, seconds)
    assert latency == pytest.approx(1e-5, rel=0.5)
    assert bandwidth == pytest.approx(1e9, rel=0.2)
    # By hand, unweighted least squares: the slope follows the largest message, and the latency is negative.
    assert np.polyfit(sizes, seconds, 1)[1] < -1e-5


def test_fit_is_never_negative():
    assert fit_link([1000, 2000], [1e-6, 4e-6])[0] == 0
    # Time does not grow with size: at least the largest message's rate.
    assert fit_link([1000, 2000], [2e-6, 1e-6])[1] == pytest.approx(2e9)


def test_best_run_after_one_that_does_not_count():
    # By hand: runs of 5, 3 and 4 s.
    clock = iter([0, 5, 10, 13, 20, 24])
    runs = []
    assert best_seconds(lambda: runs.append(1), 3, lambda: next(clock)) == 3
    assert len(runs) == 4


@pytest.fixture
def synthetic(monkeypatch):
    """Devices 0, 1, ...; the link between a and b takes 1 + a + b µs and carries 1 + b - a GB/s."""

    def seconds(a, b, size, repeats):
        return 1e-6 * (1 + a + b) + size / (1e9 * (1 + b - a))

    monkeypatch.setattr(link_speed, "_exchange_seconds", seconds)
    return seconds


def test_measured_matrices(synthetic):
    bandwidth, latency = link_speed.measure_links(range(3), (1000, 10_000), 1)
    np.testing.assert_allclose(bandwidth / 1e9, [[0, 2, 3], [2, 0, 2], [3, 2, 0]])
    np.testing.assert_allclose(latency / 1e-6, [[0, 2, 3], [2, 0, 4], [3, 4, 0]])


def test_a_poor_fit_is_reported(synthetic, monkeypatch):
    def seconds(a, b, size, repeats):
        return synthetic(a, b, size, repeats) * (3 if (a, b, size) == (0, 2, 1000) else 1)

    monkeypatch.setattr(link_speed, "_exchange_seconds", seconds)
    with pytest.warns(UserWarning, match=r"1 of 3 links .*\n0 and 2: \d+ bytes took \d+\.\d µs, the fit of"):
        link_speed.measure_links(range(3), (1000, 4000, 16_000, 64_000), 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": (64,)}, r"sizes is \(64,\)"),
        ({"sizes": (64, 64)}, r"sizes is \(64,\)"),
        ({"sizes": (0, 64)}, r"sizes is \(0, 64\)"),
        ({"repeats": 0}, "repeats 0"),
    ],
)
def test_bad_measurement(arguments, message):
    with pytest.raises(PartitionError, match=message):
        Network.measure(jax.devices()[:2], **arguments)


def test_measured_links_to_the_host(monkeypatch):
    """All devices at once: as long as the slowest of them takes, 2 µs and what 3 GB/s carry."""
    monkeypatch.setattr(link_speed, "_host_seconds", lambda devices, size, repeats: 2e-6 + size / 3e9)
    bandwidth, latency = link_speed.measure_host_links(jax.devices()[:2], (1000, 10_000), 1)
    np.testing.assert_allclose([*bandwidth, *latency], [3e9, 3e9, 2e-6, 2e-6])


def test_a_transfer_to_the_host_and_back_takes_time():
    assert 0 < link_speed._host_seconds(jax.devices()[:2], 2**16, 2) < 1


def test_a_device_has_no_link_to_itself():
    with pytest.raises(PartitionError, match="names a device twice"):
        Network.measure(jax.devices()[:1] * 2)


@pytest.mark.core
@pytest.mark.parametrize("speed", [False, True])
def test_measured_network_of_simulated_devices(speed):
    devices = jax.devices()[:4]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # simulated links share cores and caches: no fit is promised
        network = Network.measure(
            Mesh(np.array(devices).reshape(2, 2), ("data", "stage")), sizes=(2**10, 2**16), repeats=2, speed=speed
        )
    assert network.names == tuple(f"cpu:{d.id}" for d in devices)
    assert network.memory_bytes == (INF,) * 4
    assert network.speed[0] == 1 and (network.speed == (1,) * 4) != speed
    for a, b in itertools.combinations(range(4), 2):
        assert 1e-7 < network.seconds(a, b, 2**16) < 1
    assert Network.from_json(network.to_json()) == network


TWO_PROCESSES = """
import sys, warnings, jax
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
import jaxpipe
warnings.simplefilter("ignore")
print(jaxpipe.Network.measure(sizes=(2**10, 2**16), repeats=2, speed=True).to_json())
"""


@pytest.mark.slow
def test_two_processes_agree():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", TWO_PROCESSES, str(port)]
    processes = [
        subprocess.Popen([*command, str(k)], stdout=subprocess.PIPE, text=True, env={**os.environ}) for k in range(2)
    ]
    texts = [process.communicate(timeout=120)[0] for process in processes]
    first, second = (Network.from_json(text[text.index("{") : text.rindex("}") + 1]) for text in texts)
    assert first == second and first.num_devices == 4


def test_memory_as_texts_and_one_number_for_all_devices():
    network = Network(PAIR, memory_bytes="8GiB", speed=2)
    assert (network.memory_bytes, network.speed) == ((8 * 2**30,) * 2, (2, 2))
    assert Network(PAIR, memory_bytes=("8GB", 4e9)).memory_bytes == (8e9, 4e9)
    nodes = [Node(2, 1e9, memory_bytes="80GB"), Node(1, 1e9, memory_bytes=24e9)]
    assert Network.from_nodes(nodes, 1e9).memory_bytes == (80e9, 80e9, 24e9)
    with pytest.raises(MemoryBudgetError, match=r"memory_bytes='8 apples' is not a size"):
        Network(PAIR, memory_bytes="8 apples")
