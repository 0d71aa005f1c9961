"""A compiled program for each stage, dispatched by the host. A step is one graph, and passes make it one that runs.

stages, schedule ──training_graph.py──▶ StepGraph: values (numbers), tasks (traced functions), sends, in an order
StepGraph ──passes.py──▶ without what nobody reads; swaps; combined messages; donated operands; drops
its distinct tasks ──compile_tasks.py──▶ executables, each for its stage's devices
graph, executables ──dispatch.py──▶ a step: a loop over the graph's instructions, which waits for nothing

To add a feature: a function from graph to graph in a file of its own, and its line in ``passes.PASSES``; or work of
its own (a function over trees of arrays, ``step_graph.Work``) that a part of ``training_graph`` runs.
``step_graph.py`` has all data that a pass sees: ``graph.values[k]`` is the shape, the place and the form of value
``k``, and an instruction says which values it reads and writes.
"""
