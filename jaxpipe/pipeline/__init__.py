"""The executor: one compiled program for each training step."""
