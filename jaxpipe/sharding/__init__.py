"""Shardings inside a stage.

In: a mesh with more axes than ``stage`` and ``data``, and the partition specs of a model's variables.
Out: a group of devices for each stage and replica, and the partition spec of every array in it.
"""
