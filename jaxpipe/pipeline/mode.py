"""Signs that an evaluation or a prediction runs in training mode: random draws, new batch statistics."""

from collections.abc import Callable
from typing import Any

from jaxpipe import _compat
from jaxpipe.model import BoundModel
from jaxpipe.pipeline import checks
from jaxpipe.pipeline.objective import Objective
from jaxpipe.pipeline.statistics import find_statistics


#: Primitives that make random numbers; others only make keys.
_DRAWS = frozenset(("random_bits", "random_gamma", "rng_bit_generator", "threefry2x32"))


def warn_if_training(
    objective: Objective, model: BoundModel, name: str, rows: int, trace: Callable[[int], Objective]
) -> None:
    """Give a ``TrainingModeWarning`` if a function draws from the model's random streams, or updates statistics.

    Args:
      trace: traces the function for another number of examples.
    """
    drawn = random_draws(objective)
    updated = [model.state[k].name for k in find_statistics(objective, rows, trace).state]
    if drawn or updated:
        checks.warn_training_mode(name, drawn, updated)


def random_draws(objective: Objective) -> list[str]:
    """Return the paths of the modules that draw random numbers which follow from the micro-batch's key."""
    seeded, paths = {objective.key}, {}
    for op in objective.graph.operators:
        if seeded.isdisjoint(op.inputs):
            continue
        seeded.update(op.outputs)
        if op.equation is not None and _draws(op.equation):
            paths[op.path or op.label] = None
    return list(paths)


def _draws(equation: Any) -> bool:
    if equation.primitive.name in _DRAWS:
        return True
    return any(
        _draws(inner) for program in _compat.inner_programs(equation) for inner in _compat.open_jaxpr(program)[0].eqns
    )
