"""The cheapest tensors from which others follow: a minimum cut, by Dinic's maximum flow.

It is written here because importing ``scipy.sparse.csgraph`` takes 15 MiB in every process that trains.
"""

from collections.abc import Iterable, Mapping

from jaxpipe.array_types import TensorNumber


def minimum_cut(
    price: Mapping[TensorNumber, int], sources: Mapping[TensorNumber, list[TensorNumber]], needs: Iterable[TensorNumber]
) -> set[TensorNumber]:
    """Return the cheapest set of tensors from which all ``needs`` follow; of equals, the one nearest to them.

    Args:
      sources: what a tensor follows from; those without an entry follow from nothing.

    Example:
      >>> minimum_cut({0: 3, 1: 1, 2: 2}, {1: [0], 2: [1]}, [2])
      {1}
    """
    node = {t: 2 * k for k, t in enumerate(price)}
    origin, sink = 2 * len(node), 2 * len(node) + 1
    unlimited = sum(price.values()) + 1
    flow = _Flow(2 * len(node) + 2)
    # Each tensor is an edge with its price as capacity.
    for t, k in node.items():
        flow.add(k, k + 1, price[t])
        for u in sources.get(t, ()):
            flow.add(node[u] + 1, k, unlimited)
        if t not in sources:
            flow.add(origin, k, unlimited)
    for t in set(needs):
        flow.add(node[t] + 1, sink, unlimited)
    while (near := flow.distances(sink))[origin] >= 0:
        flow.block(origin, sink, near)
    return {t for t, k in node.items() if near[k + 1] >= 0 > near[k]}


class _Flow:
    """A network with a flow; edge ``e ^ 1`` is edge ``e`` backward.

    Attributes:
      edges: those that leave a node.
      target: of each edge.
      left: capacity of each edge that the flow leaves.
    """

    def __init__(self, nodes: int):
        self.edges: list[list[int]] = [[] for _ in range(nodes)]
        self.target: list[int] = []
        self.left: list[int] = []

    def add(self, a: int, b: int, capacity: int) -> None:
        """Add an edge."""
        for source, target, left in ((a, b, capacity), (b, a, 0)):
            self.edges[source].append(len(self.target))
            self.target.append(target)
            self.left.append(left)

    def distances(self, sink: int) -> list[int]:
        """Count the edges with capacity left between each node and the sink; -1 for nodes that do not reach it."""
        distance, queue, target, left = [-1] * len(self.edges), [sink], self.target, self.left
        distance[sink] = 0
        for node in queue:
            for e in self.edges[node]:
                if left[e ^ 1] and distance[target[e]] < 0:
                    distance[target[e]] = distance[node] + 1
                    queue.append(target[e])
        return distance

    def block(self, origin: int, sink: int, distance: list[int]) -> None:
        """Saturate an edge of every shortest path."""
        tried = [0] * len(self.edges)
        path: list[int] = []
        node = origin
        while True:
            if node == sink:
                amount = min(self.left[e] for e in path)
                for e in path:
                    self.left[e] -= amount
                    self.left[e ^ 1] += amount
                full = next(k for k, e in enumerate(path) if not self.left[e])
                node = self.target[path[full] ^ 1]
                del path[full:]
            elif tried[node] < len(self.edges[node]):
                e = self.edges[node][tried[node]]
                if self.left[e] and distance[self.target[e]] == distance[node] - 1:
                    path.append(e)
                    node = self.target[e]
                else:
                    tried[node] += 1
            elif path:
                node = self.target[path.pop() ^ 1]
                tried[node] += 1
            else:
                return
