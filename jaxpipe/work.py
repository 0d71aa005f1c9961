"""What kind of work an operator is: a view, cheap arithmetic, or something worth keeping the result of."""

from jaxpipe import _compat
from jaxpipe.graph import GraphBuilder, Operator


#: Operators that move or rename elements and compute nothing.
VIEWS = frozenset(
    [
        "broadcast_in_dim",
        "copy",
        "copy_p",
        "expand_dims",
        "iota",
        "name",
        "pcast",
        "pvary",
        "random_unwrap",
        "random_wrap",
        "reshape",
        "rev",
        "sharding_constraint",
        "slice",
        "split",
        "squeeze",
        "transpose",
    ]
)

#: One or a few machine operations for each element, no element read twice.
ARITHMETIC = frozenset(
    [
        "abs",
        "add",
        "add_any",
        "and",
        "bitcast_convert_type",
        "ceil",
        "clamp",
        "concatenate",
        "convert_element_type",
        "div",
        "eq",
        "floor",
        "ge",
        "gt",
        "imag",
        "integer_pow",
        "is_finite",
        "le",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "nextafter",
        "not",
        "or",
        "pad",
        "population_count",
        "real",
        "reduce_precision",
        "rem",
        "round",
        "rsqrt",
        "select_n",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "sign",
        "sqrt",
        "square",
        "stop_gradient",
        "sub",
        "xor",
    ]
)

#: Tens of machine operations for each element.
TRANSCENDENTAL = frozenset(
    [
        "acos",
        "acosh",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "cbrt",
        "cos",
        "cosh",
        "erf",
        "erf_inv",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "logistic",
        "pow",
        "sin",
        "sinh",
        "tan",
        "tanh",
    ]
)


def weight(op: Operator) -> int | None:
    """Relative work for one element: 0 for a view, 1 for arithmetic, 4 for a transcendental function.

    None for everything else (products, reductions, gathers, random numbers, control flow, opaque derivatives): its
    result is not recomputed by default. A dropout mask takes 1 bit for each element; to draw it again from its key
    takes about a hundred operations.
    """
    if op.has_effects:
        return None
    if op.name in VIEWS or op.equation is None:
        return 0
    if op.name in ARITHMETIC:
        return 1
    if op.name in TRANSCENDENTAL:
        return 4
    if op.name == "custom_jvp_call":
        body, _ = _compat.open_jaxpr(op.params["call_jaxpr"])
        builder = GraphBuilder()
        builder.read(op.params["call_jaxpr"], [builder.tensor(var.aval) for var in body.invars])
        weights = [weight(part) for part in builder.operators]
        return None if None in weights else sum(w for w in weights if w is not None)
    return None
