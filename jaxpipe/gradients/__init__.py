"""Gradients between replicas: a block-sparse exchange with error feedback.

blocks        which parts of a gradient are one block
exchange      what replicas send each other, inside the compiled program
block_sparse  the optax transformation, with its residual
run_length    a code for sparse arrays outside the compiled program
"""

from jaxpipe.gradients.block_sparse import BlockSparse as BlockSparse
from jaxpipe.gradients.block_sparse import BlockSparseState as BlockSparseState
from jaxpipe.gradients.block_sparse import block_sparse as block_sparse
from jaxpipe.gradients.block_sparse import state_specs as state_specs
from jaxpipe.gradients.exchange import Traffic as Traffic
