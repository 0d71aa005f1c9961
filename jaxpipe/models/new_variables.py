"""State variables that a call makes, which the model did not have before.

What a micro-batch makes is gone after it, as what ``sow`` collects. That changes nothing where no later call reads it.
"""

from collections.abc import Callable, Mapping, Sequence

import jax

from jaxpipe.array_types import Array, ArrayLike, PyTree
from jaxpipe.errors import ModelError
from jaxpipe.graph.graph import live, read_graph
from jaxpipe.models.check_batch import shape_of
from jaxpipe.models.variable_trees import Path, path_text


def check_unread(new: Mapping[Path, ArrayLike], call_again: Callable[[Sequence[Array]], PyTree]) -> None:
    """Raise ``ModelError`` if the next call would read variables that a call has made.

    Args:
      new: the variables that it has made.
      call_again: the results of the same call, of a model that has these variables from the beginning.
    """
    closed = jax.make_jaxpr(call_again)([shape_of(x) for x in new.values()])
    graph = read_graph(closed)
    read = {t for op in live(graph.operators, graph.outputs) for t in op.inputs} | set(graph.outputs)
    names = [path_text(path) for path, t in zip(new, graph.inputs, strict=True) if t in read]
    if names:
        raise ModelError(
            f"A call makes the state variable{'s' if len(names) > 1 else ''} {', '.join(names[:3])}"
            f"{' and others' if len(names) > 3 else ''}, which the model does not have before, and the next call reads "
            "it. A step is compiled once, for a structure of variables that no call changes: make the variable when "
            "the model is initialized (Linen: before `if self.is_initializing()`; NNX: in __init__)."
        )
