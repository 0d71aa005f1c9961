"""Decisions made before anything is compiled: where to cut, where to place, what to store."""

from jaxpipe.planning.layers import partition_layers as partition_layers
from jaxpipe.planning.placed import Partition as Partition
from jaxpipe.planning.placed import StageCost as StageCost
from jaxpipe.planning.storing.plan import StoragePlan as StoragePlan
from jaxpipe.planning.storing.plan import TensorChoice as TensorChoice
from jaxpipe.planning.storing.plan import plan_storage as plan_storage
