"""One compiled program for all devices.

stages, schedule ──tick_table.py──▶ what every device does in each tick, and where it keeps what, as numbers
arrays of devices ──buffer_layout.py──▶ buffers that look alike on all of them
stages, table, layouts ──tick_loop.py──▶ a scan over ticks, with a conditional over stages and ``ppermute``
loop, optimizer ──compiled_step.py──▶ training step, gradients, evaluation, prediction
"""
