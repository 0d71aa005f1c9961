"""Put the devices of a mesh in the order in which stages use them."""

from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from jaxpipe.costs.network import Network
from jaxpipe.sharding.mesh_axes import STAGE


def arrange(mesh: Mesh, groups: Sequence[Sequence[int]], network: Network) -> Mesh:
    """Return the same mesh with the devices of each stage's group, numbers in ``mesh.devices.flat``, in its places.

    On a mesh with one axis these follow each other. Otherwise there is one for each replica, and replicas of
    neighboring stages are paired so that the slowest link between two is the fastest.
    """
    flat = mesh.devices.flatten()
    if mesh.devices.ndim == 1:
        return Mesh(flat[np.concatenate(groups)], mesh.axis_names, axis_types=mesh.axis_types)
    rows = [tuple(groups[0])]
    for group in groups[1:]:
        rows.append(pair(rows[-1], group, network))
    places = np.moveaxis(np.array(rows), 0, mesh.axis_names.index(STAGE)).reshape(mesh.devices.shape)
    return Mesh(flat[places], mesh.axis_names, axis_types=mesh.axis_types)


def pair(before: Sequence[int], group: Sequence[int], network: Network) -> tuple[int, ...]:
    """The devices of a group in the order of their partners, so that the slowest link is as fast as can be.

    Example:
      >>> pair((0, 1), (2, 3), Network([[0, 1, 1, 9], [1, 0, 9, 1], [1, 9, 0, 1], [9, 1, 1, 0]]))
      (3, 2)
    """
    if len(group) == 1:
        return tuple(group)
    from scipy.optimize import linear_sum_assignment  # not above: it takes 18 MiB in every process that trains

    # Links from the slowest to the fastest; no sum of faster ones outweighs a slower one.
    seconds = network.latency[np.ix_(before, group)] + 1.0 / np.maximum(network.bandwidth[np.ix_(before, group)], 1e-9)
    ranks = np.unique(seconds, return_inverse=True)[1].reshape(seconds.shape)
    chosen = linear_sum_assignment(np.minimum(float(len(group) + 1) ** ranks, 1e300))[1]
    return tuple(int(group[k]) for k in chosen)
