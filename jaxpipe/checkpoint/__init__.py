"""Checkpoints in the model's own layout: for any number of stages, any mesh, or none.

In: a training state by stage.
Out: a directory written whole or not at all, whose arrays have the paths that the model and optax give them.
"""

from jaxpipe.checkpoint.checkpointer import Checkpointer as Checkpointer
from jaxpipe.checkpoint.load import Checkpoint as Checkpoint
from jaxpipe.checkpoint.load import load as load
from jaxpipe.checkpoint.orbax_files import steps as steps
