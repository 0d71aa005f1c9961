"""Cuts of a program into stages, and the devices of each stage.

In: a profile, a network, a cost model.
Out: a ``Partition``, with a bound that no other one is below.
"""
