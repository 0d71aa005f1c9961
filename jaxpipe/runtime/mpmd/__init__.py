"""A compiled program for each stage, dispatched by the host.

stages, schedule ──schedule_to_calls.py──▶ a list of calls and sends over named arrays
its distinct programs ──compile_work.py──▶ executables, each for its stage's device
list, executables ──dispatch.py──▶ a step: a loop over the list, which waits for nothing
"""
