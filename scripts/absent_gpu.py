"""An absent GPU to compile for; see ``jaxpipe.costs.absent_gpu`` for what it needs."""

from jaxpipe.costs.absent_gpu import H100 as H100
from jaxpipe.costs.absent_gpu import h100s as h100s
