"""Decisions made before anything is compiled: where to cut, on which devices, what to save under a budget.

In: a checked request, a profile of the model, a network, schedules.
Out: ``PlannedStep``: a plan with its seconds and bytes, and everything that a runtime needs to run it.
"""

from jaxpipe.planning.cuts.partition_layers import partition_layers as partition_layers
from jaxpipe.planning.cuts.placed_stages import Partition as Partition
from jaxpipe.planning.cuts.placed_stages import StageCost as StageCost
from jaxpipe.planning.exchange_costs import ExchangeCosts as ExchangeCosts
from jaxpipe.planning.exchange_costs import compare_exchanges as compare_exchanges
from jaxpipe.planning.storage.plan_storage import StoragePlan as StoragePlan
from jaxpipe.planning.storage.plan_storage import TensorChoice as TensorChoice
from jaxpipe.planning.storage.plan_storage import plan_storage as plan_storage
