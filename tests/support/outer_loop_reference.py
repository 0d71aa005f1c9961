"""The outer loop in NumPy, to compare with: each replica's parameters as arrays by name."""

import numpy as np

from tests.support import block_sparse_reference


class Reference:
    """The method, one replica after the other.

    ``average`` gives of a parameter's pseudo-gradients, by name, the average and what each replica did not send.
    """

    def __init__(self, params, replicas, inner_steps, fragments, average, delay=0, rate=0.7, momentum=0.9):
        self.own = [{name: np.array(x) for name, x in params.items()} for _ in range(replicas)]
        self.outer = {name: np.array(x, np.float32) for name, x in params.items()}
        self.velocity = {name: np.zeros_like(x) for name, x in self.outer.items()}
        self.inner_steps, self.fragments, self.delay = inner_steps, fragments, delay
        self.average, self.pending = average, {}
        self.rate, self.momentum = np.float32(rate), np.float32(momentum)
        self.steps = 0

    def turn(self, step):
        """The names whose turn a step is."""
        for f, names in enumerate(self.fragments):
            first = (f + 1) * self.inner_steps // len(self.fragments)
            if step in range(first, step + 1, self.inner_steps):
                return names
        return ()

    def step(self, updates):
        """Make an inner step with an update of each replica."""
        self.steps += 1
        for own, update in zip(self.own, updates, strict=True):
            for name in own:
                own[name] = own[name] + update[name]
        for name in self.turn(self.steps):
            gradient, left = self.average(name, [self.outer[name] - own[name] for own in self.own])
            self.velocity[name] = gradient + self.momentum * self.velocity[name]
            self.outer[name] = self.outer[name] - self.rate * (gradient + self.momentum * self.velocity[name])
            self.pending[name] = [self.outer[name] - x - own[name] for own, x in zip(self.own, left, strict=True)]
        for name in self.turn(self.steps - self.delay):
            for own, move in zip(self.own, self.pending[name], strict=True):
                own[name] = own[name] + move


def mean(_, gradients):
    """The average of a dense exchange, of which nothing is left."""
    return sum(gradients) / np.float32(len(gradients)), [np.float32(0)] * len(gradients)


def best_blocks(**arguments):
    """The average of the best blocks, without residuals from before, and what is left."""

    def average(name, gradients):
        reference = block_sparse_reference.Reference(**{"norm": "l2", "mode": "own", **arguments})
        mean = reference(name, gradients)
        return mean, reference.left.get(name, [np.float32(0)] * len(gradients))

    return average
