"""The public names, for ``jaxpipe/__init__.py`` and for type checkers."""

from . import checkpoint as checkpoint
from . import gradients as gradients
from . import planning as planning
from . import schedules as schedules
from .checkpoint import Checkpointer as Checkpointer
from .costs import topology as topology
from .costs.network import Network as Network
from .costs.profile import Profile as Profile
from .costs.profile_model import profile_model as profile_model
from .costs.topology import Node as Node
from .errors import BatchError as BatchError
from .errors import CheckpointError as CheckpointError
from .errors import CodecWarning as CodecWarning
from .errors import DifferentiationError as DifferentiationError
from .errors import FewExamplesWarning as FewExamplesWarning
from .errors import InitialValuesWarning as InitialValuesWarning
from .errors import JaxpipeError as JaxpipeError
from .errors import JaxpipeWarning as JaxpipeWarning
from .errors import MemoryBudgetError as MemoryBudgetError
from .errors import ModelError as ModelError
from .errors import NonFiniteError as NonFiniteError
from .errors import PartitionError as PartitionError
from .errors import ScheduleError as ScheduleError
from .errors import TrainingModeWarning as TrainingModeWarning
from .models.combine_metrics import Sum as Sum
from .multihost import initialize_distributed as initialize_distributed
from .options import PlanOptions as PlanOptions
from .partition import partition as partition
from .pipeline import Pipeline as Pipeline
from .plan import Plan as Plan
from .planning.memory_report import MemoryReport as MemoryReport
from .residuals.density import Density as Density
from .residuals.density import measure_density as measure_density
from .residuals.density import with_density as with_density
from .residuals.memory_encoded import memory_encoded as memory_encoded
from .residuals.memory_encoded import without_encoding as without_encoding
from .residuals.residual_report import ResidualReport as ResidualReport
from .residuals.residual_report import count_overflows as count_overflows
from .residuals.residual_report import residual_report as residual_report
from .runtime.nonfinite_origin import NonFiniteOrigin as NonFiniteOrigin
from .runtime.train_state import TrainState as TrainState
from .schedules.table import Schedule as Schedule
from .visualize import pictures as pictures
from .visualize import traces as traces

__version__: str
