"""jaxpipe: train any Flax model as a pipeline over several GPUs under a memory budget."""

from jaxpipe import checkpoint as checkpoint
from jaxpipe import gradients as gradients
from jaxpipe import metrics as metrics
from jaxpipe import traces as traces
from jaxpipe.checkpoint import Checkpointer as Checkpointer
from jaxpipe.density import Density as Density
from jaxpipe.density import measure_density as measure_density
from jaxpipe.density import with_density as with_density
from jaxpipe.distributed import initialize_distributed as initialize_distributed
from jaxpipe.encode import memory_encoded as memory_encoded
from jaxpipe.encode import without_encoding as without_encoding
from jaxpipe.errors import BatchError as BatchError
from jaxpipe.errors import CheckpointError as CheckpointError
from jaxpipe.errors import CodecError as CodecError
from jaxpipe.errors import DifferentiationError as DifferentiationError
from jaxpipe.errors import ExchangeError as ExchangeError
from jaxpipe.errors import JaxpipeError as JaxpipeError
from jaxpipe.errors import MemoryBudgetError as MemoryBudgetError
from jaxpipe.errors import ModelError as ModelError
from jaxpipe.errors import NetworkError as NetworkError
from jaxpipe.errors import NonFiniteError as NonFiniteError
from jaxpipe.errors import PartitionError as PartitionError
from jaxpipe.errors import PlanError as PlanError
from jaxpipe.errors import ProfileError as ProfileError
from jaxpipe.errors import ScheduleError as ScheduleError
from jaxpipe.errors import StateError as StateError
from jaxpipe.errors import TargetError as TargetError
from jaxpipe.network import Network as Network
from jaxpipe.partition import partition as partition
from jaxpipe.pipeline.nonfinite import NonFiniteOrigin as NonFiniteOrigin
from jaxpipe.pipeline.pipeline import MemoryReport as MemoryReport
from jaxpipe.pipeline.pipeline import Pipeline as Pipeline
from jaxpipe.pipeline.state import TrainState as TrainState
from jaxpipe.planning.plan import Plan as Plan
from jaxpipe.profile import Profile as Profile
from jaxpipe.profiling.model import profile_model as profile_model
from jaxpipe.report import ResidualReport as ResidualReport
from jaxpipe.report import count_overflows as count_overflows
from jaxpipe.report import residual_report as residual_report
from jaxpipe.schedules.table import Schedule as Schedule
from jaxpipe.topology import Node as Node


__version__ = "0.1.0"
