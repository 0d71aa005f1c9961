"""Checkpoints in the model's own layout: for any number of stages, any mesh, or none."""

from jaxpipe.checkpoint.checkpointer import Checkpointer as Checkpointer
from jaxpipe.checkpoint.files import steps as steps
from jaxpipe.checkpoint.load import Checkpoint as Checkpoint
from jaxpipe.checkpoint.load import load as load
