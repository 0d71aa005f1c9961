"""Signs that an evaluation or a prediction runs in training mode: random draws, new batch statistics."""

from collections.abc import Callable

from jaxpipe import _compat
from jaxpipe.array_types import Equation
from jaxpipe.errors import TrainingModeWarning, warn
from jaxpipe.graph.graph import dependents
from jaxpipe.models.batch_statistics import find_statistics
from jaxpipe.models.bound_model import BoundModel
from jaxpipe.models.microbatch_program import MicrobatchProgram


#: Primitives that make random numbers; others only make keys.
_DRAWS = frozenset(("random_bits", "random_gamma", "rng_bit_generator", "threefry2x32"))


def warn_if_training(
    objective: MicrobatchProgram, model: BoundModel, name: str, rows: int, trace: Callable[[int], MicrobatchProgram]
) -> None:
    """Give a ``TrainingModeWarning`` if a function draws from the model's random streams, or updates statistics."""
    drawn = random_draws(objective)
    updated = [model.state[k].name for k in find_statistics(objective, rows, trace).state]
    if not drawn and not updated:
        return
    signs = [
        f"{verb} {', '.join(items[:3])}{' and others' if len(items) > 3 else ''}"
        for verb, items in (("draws random numbers in", drawn), ("computes new batch statistics for", updated))
        if items
    ]
    warn(
        f"{name} {' and '.join(signs)}, as a model in training mode does. Switch the mode in {name}: model.eval() for "
        "NNX, the module's own argument for Linen, such as model(x, train=False) or deterministic=True. If it is meant "
        "so, as for samples, silence this with warnings.simplefilter('ignore', jaxpipe.TrainingModeWarning).",
        TrainingModeWarning,
    )


def random_draws(objective: MicrobatchProgram) -> list[str]:
    """Return the paths of the modules that draw random numbers which follow from the micro-batch's key."""
    operators = objective.graph.operators
    seeded = dependents(operators, [objective.key])
    reading = [op for op in operators if op.equation is not None and not seeded.isdisjoint(op.inputs)]
    return list(dict.fromkeys(op.path or op.label for op in reading if _draws(op.equation)))


def _draws(equation: Equation) -> bool:
    if equation.primitive.name in _DRAWS:
        return True
    return any(
        _draws(inner) for program in _compat.inner_programs(equation) for inner in _compat.open_jaxpr(program)[0].eqns
    )
