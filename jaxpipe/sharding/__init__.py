"""The axes of a mesh: stages, replicas, and those that shard inside a stage.

In: a caller's mesh and partition specs.
Out: a group of devices for each stage and replica, and the partition spec of every array in it.
"""
