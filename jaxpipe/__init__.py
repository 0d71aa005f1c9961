"""jaxpipe: train any Flax model as a pipeline over several GPUs under a memory budget."""

from jaxpipe.encode import memory_encoded as memory_encoded
from jaxpipe.encode import without_encoding as without_encoding
from jaxpipe.errors import CodecError as CodecError
from jaxpipe.errors import DifferentiationError as DifferentiationError
from jaxpipe.errors import JaxpipeError as JaxpipeError
from jaxpipe.errors import TargetError as TargetError
from jaxpipe.report import ResidualReport as ResidualReport
from jaxpipe.report import residual_report as residual_report


__version__ = "0.1.0"
