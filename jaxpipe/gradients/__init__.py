"""Optax transformations of gradients: a block-sparse exchange with error feedback; stages apart; master weights.

blocks          which parts of a gradient are one block
exchange        what replicas send each other, inside the compiled program
block_sparse    the optax transformation, with its residual
run_length      a code for sparse arrays outside the compiled program
per_stage       a transformation that looks at each pipeline stage apart
master_weights  float32 copies of narrower parameters
"""

from jaxpipe.gradients.block_sparse import BlockSparse as BlockSparse
from jaxpipe.gradients.block_sparse import BlockSparseState as BlockSparseState
from jaxpipe.gradients.block_sparse import block_sparse as block_sparse
from jaxpipe.gradients.block_sparse import state_specs as state_specs
from jaxpipe.gradients.exchange import Traffic as Traffic
from jaxpipe.gradients.master_weights import MasterWeightsState as MasterWeightsState
from jaxpipe.gradients.master_weights import master_weights as master_weights
from jaxpipe.gradients.per_stage import per_stage as per_stage
