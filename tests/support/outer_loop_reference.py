"""The outer loop in NumPy, to compare with: each replica's parameters as arrays by name."""

import numpy as np


class Reference:
    """The method, one replica after the other; ``average`` gives that of a parameter's pseudo-gradients by name."""

    def __init__(self, params, replicas, inner_steps, fragments, average, delay=0, keep=0.0, rate=0.7, momentum=0.9):
        self.own = [{name: np.array(x) for name, x in params.items()} for _ in range(replicas)]
        self.outer = {name: np.array(x, np.float32) for name, x in params.items()}
        self.velocity = {name: np.zeros_like(x) for name, x in self.outer.items()}
        self.inner_steps, self.fragments, self.delay = inner_steps, fragments, delay
        self.average, self.keep = average, np.float32(keep)
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
            gradient = self.average(name, [self.outer[name] - own[name] for own in self.own])
            self.velocity[name] = gradient + self.momentum * self.velocity[name]
            self.outer[name] = self.outer[name] - self.rate * (gradient + self.momentum * self.velocity[name])
        for name in self.turn(self.steps - self.delay):
            for own in self.own:
                own[name] = self.keep * own[name] + (1 - self.keep) * self.outer[name]


def mean(_, gradients):
    """The average of a dense exchange."""
    return sum(gradients) / np.float32(len(gradients))
