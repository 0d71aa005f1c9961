"""A compiled program for each stage, dispatched by the host.

sections, schedule ──calls.py──▶ a list of calls and sends over named arrays
its distinct programs ──compile.py──▶ executables, each for its stage's device
list, executables ──dispatch.py──▶ a step: a loop over the list, which waits for nothing
"""
