"""A network as a table to read: every link of a small one, kinds of links of a large one."""

import math
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from jaxpipe.costs.topology import PCIE_3_X16
from jaxpipe.text.plain_table import PlainTable
from jaxpipe.text.short_names import number_ranges
from jaxpipe.text.units import bytes_text


if TYPE_CHECKING:
    from jaxpipe.costs.network import Network

#: A matrix of more devices does not fit into 120 columns.
MOST_COLUMNS = 16


def network_table(network: "Network") -> PlainTable:
    """Every device with its links if they are at most 16, else one row for each kind of link."""
    return _matrix(network) if network.num_devices <= MOST_COLUMNS else _kinds(network)


def _matrix(network: "Network") -> PlainTable:
    table = PlainTable(
        title="GB/s above the diagonal, µs below",
        padding=0,
    )
    table.add_column("", justify="right")
    table.add_column("device", max_width=12, no_wrap=True)
    table.add_column("speed", justify="right")
    table.add_column("memory", justify="right", no_wrap=True)
    if _tells_of_host(network):
        table.add_column("host GB/s", justify="right")
    for k in range(network.num_devices):
        table.add_column(str(k), justify="right", no_wrap=True)
    scaled = np.where(np.tri(network.num_devices, dtype=bool), 1e6 * network.latency, network.bandwidth / 1e9)
    for row in range(network.num_devices):
        cells = [short(x) if network.bandwidth[row, column] else "-" for column, x in enumerate(scaled[row])]
        cells[row] = ""
        host = [_host(network, row)] if _tells_of_host(network) else []
        table.add_row(str(row), network.names[row], short(network.speed[row]), _memory(network, row), *host, *cells)
    return table


def _kinds(network: "Network") -> PlainTable:
    kinds = defaultdict(list)
    for a in range(network.num_devices):
        for b in range(a + 1, network.num_devices):
            kinds[network.bandwidth[a, b], network.latency[a, b]].append(f"{a}-{b}")
    alike = defaultdict(list)
    for k in range(network.num_devices):
        host = f", host {_host(network, k)} GB/s" if _tells_of_host(network) else ""
        alike[network.speed[k], _memory(network, k) + host].append(k)
    table = PlainTable(title=f"{network.num_devices} devices")
    table.add_numbers("GB/s", "µs", "links")
    table.add_column("between")
    for (bandwidth, latency), links in sorted(kinds.items(), reverse=True):
        between = ", ".join(links[:6]) + (", ..." if len(links) > 6 else "")
        table.add_row(short(bandwidth / 1e9), short(1e6 * latency), str(len(links)), between)
    table.caption = "\n".join(
        f"{len(devices)} of speed {short(speed)} and memory {memory}: {number_ranges(devices)}"
        for (speed, memory), devices in alike.items()
    )
    return table


def _tells_of_host(network: "Network") -> bool:
    """Return whether something is known of the links to the host."""
    return any(rate != PCIE_3_X16 for rate in network.host_bandwidth_bytes_per_second)


def _host(network: "Network", device: int) -> str:
    return short(network.host_bandwidth_bytes_per_second[device] / 1e9)


def _memory(network: "Network", device: int) -> str:
    count = network.memory_bytes[device]
    return "no limit" if count == math.inf else bytes_text(count)


def short(value: float) -> str:
    """Three digits of a number that is not negative, without an exponent where it is between 0.001 and 100000."""
    return f"{value:.0f}" if 1000 <= value < 1e5 else f"{value:.3g}"
