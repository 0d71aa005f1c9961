"""Storage for the backward pass under a budget: problem, solvers, and their use on a stage."""
