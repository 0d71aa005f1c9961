"""One compiled program for all devices.

stages, schedule ──tick_table.py──▶ what every device does in each tick, as numbers
table, stage_branches.py ──tick_loop.py──▶ a scan over ticks, with a conditional over stages and ``ppermute``
loop, optimizer ──compiled_step.py──▶ a compiled training step
"""
