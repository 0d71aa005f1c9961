"""Links between the devices of a mesh where no network was passed."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxpipe.costs import assumed_links
from jaxpipe.costs.network import Network


pytestmark = pytest.mark.core


def fake_mesh(processes, axes):
    """A mesh of devices, each known by its process."""
    places = np.array(processes)
    devices = np.empty(places.shape, object)
    for place, process in np.ndenumerate(places):
        devices[place] = SimpleNamespace(process_index=int(process), platform="cpu", client=None)
    return SimpleNamespace(devices=devices, axis_names=axes, shape=dict(zip(axes, places.shape, strict=True)))


@pytest.fixture
def measured(monkeypatch):
    """Replace the measurement of a link by 2 GB/s and 10 us; gives the processes of the pairs that were measured."""
    pairs = []

    def measure(devices, sizes, repeats):
        pairs.append([device.process_index for device in devices])
        return np.array([[0, 2e9], [2e9, 0]]), np.array([[0, 1e-5], [1e-5, 0]])

    monkeypatch.setattr(assumed_links, "measure_links", measure)
    return pairs


def test_one_process_has_links_as_fast_as_memory(measured):
    assert assumed_links.assumed_links(fake_mesh([0, 0, 0], ("stage",)), 1e10, True) == Network.uniform(3, 1e10)
    assert not measured


def test_links_between_processes_are_those_of_one_pair(measured):
    mesh = fake_mesh([0, 0, 1, 1], ("stage",))
    network = assumed_links.assumed_links(mesh, 1e10, True)
    assert measured == [[0, 1]]
    gigabytes = [[0, 10, 2, 2], [10, 0, 2, 2], [2, 2, 0, 10], [2, 2, 10, 0]]
    assert network == Network(1e9 * np.array(gigabytes), 1e-5 * (np.array(gigabytes) == 2))
    assert assumed_links.slowest_used(network, mesh) == Network.uniform(4, 2e9, 1e-5)


def test_nothing_is_measured_for_an_estimate(measured):
    assert assumed_links.assumed_links(fake_mesh([0, 1], ("stage",)), 1e10, False) == Network.uniform(2, 1e10)
    assert not measured


def test_links_that_no_step_uses_do_not_count(measured):
    # Two stages in each of two processes, and two replicas: a process has one replica.
    replicas = fake_mesh([[0, 0], [1, 1]], ("data", "stage"))
    network = assumed_links.assumed_links(replicas, 1e10, True)
    assert measured == [[0, 1]]  # gradients are exchanged between the processes
    assert assumed_links.slowest_used(network, replicas) == Network.uniform(4, 2e9, 1e-5)
    # Of devices 0 and 2 in one process and 1 in another, only stages 0 and 1 and stages 1 and 2 are neighbors.
    network = Network([[0, 9, 1], [9, 0, 9], [1, 9, 0]])
    assert assumed_links.slowest_used(network, fake_mesh([0, 1, 0], ("stage",))) == Network.uniform(3, 9)


def test_a_mesh_of_real_devices_needs_no_measurement(measured):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",))
    assert assumed_links.assumed_links(mesh, 5e9, True) == Network.uniform(2, 5e9)
