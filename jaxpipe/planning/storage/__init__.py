"""Storage for the backward pass under a budget.

In: the backward pass of a stage as items and events, bytes and seconds of each choice, a budget.
Out: a format, a swap or a recomputation for each tensor, simulated after a solver or a greedy rule has chosen it.
"""
