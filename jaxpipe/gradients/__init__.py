"""Optax transformations: block-sparse exchange and late gradients, with error feedback; stages apart; master weights.

In: gradients of a replica.
Out: updates, and the bytes that replicas send each other for them.
"""

from jaxpipe.gradients.block_exchange import Traffic as Traffic
from jaxpipe.gradients.block_sparse import BlockSparse as BlockSparse
from jaxpipe.gradients.block_sparse import BlockSparseState as BlockSparseState
from jaxpipe.gradients.block_sparse import block_sparse as block_sparse
from jaxpipe.gradients.block_sparse import state_specs as state_specs
from jaxpipe.gradients.delay_error_feedback import delay_error_feedback as delay_error_feedback
from jaxpipe.gradients.master_weights import MasterWeightsState as MasterWeightsState
from jaxpipe.gradients.master_weights import master_weights as master_weights
from jaxpipe.gradients.outer_loop import OuterLoop as OuterLoop
from jaxpipe.gradients.outer_loop import OuterLoopState as OuterLoopState
from jaxpipe.gradients.outer_loop import outer_loop as outer_loop
from jaxpipe.gradients.per_stage import per_stage as per_stage
