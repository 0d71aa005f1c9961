"""Runtimes: the programs of a pipeline's stages on devices, and calls of them in the order of a schedule.

In: an ``ExecutablePlan``: stages, a schedule, an optimizer, devices.
Out: training steps, gradients, evaluations and states: by stage programs (``mpmd``) or by one program (``spmd``).
"""
