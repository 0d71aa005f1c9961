"""The one table of JAX's primitives: what kind of work each is, by name.

A primitive that is in no set is opaque: it runs again only where it must, and is priced as a kernel of its own.
"""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Operators that move or rename elements and compute nothing.
VIEWS = _names(
    """
    broadcast_in_dim copy copy_p expand_dims iota name pcast pvary random_unwrap random_wrap reshape rev
    sharding_constraint slice split squeeze tile transpose unstack
    """
)

#: One or a few machine operations for each element, no element read twice.
ARITHMETIC = _names(
    """
    abs add add_any and bitcast_convert_type ceil clamp clz complex concatenate conj convert_element_type div eq
    eq_to floor ge gt imag integer_pow is_finite le le_to lt lt_to max min mul mulhi ne neg nextafter not
    one_minus_square or pad population_count real reduce_precision rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sqrt square stack stop_gradient sub xor
    """
)

#: Tens of machine operations for each element.
TRANSCENDENTAL = _names(
    """
    acos acosh asin asinh atan atan2 atanh cbrt cos cosh erf erf_inv erfc exp exp2 expm1 log log1p log2 logistic
    polynomial pow sin sinh tan tanh
    """
)

#: Operators whose result has at each place what follows from the elements of their operands at the same place.
POINTWISE = (ARITHMETIC | TRANSCENDENTAL | _names("call_boundary copy copy_p name")) - _names("concatenate pad stack")

#: Views whose result has the same elements, maybe several times, in another shape.
REARRANGES = _names("broadcast_in_dim reshape squeeze transpose")

#: Tests of which of two numbers is the larger one.
ORDERINGS = _names("ge gt le lt")

#: These, and tests of whether two numbers are equal.
COMPARISONS = ORDERINGS | _names("eq ne")

#: Matrix products and convolutions.
PRODUCTS = _names("conv_general_dilated dot_general")

#: Operators that combine elements along some axes, their ``axes``.
REDUCTIONS = _names("argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum")

#: Operators that XLA fuses with what they read.
ELEMENTWISE = ARITHMETIC | TRANSCENDENTAL | VIEWS

#: Those of them that XLA does not compute again for each reader, though cheap to look at.
COSTLY = TRANSCENDENTAL | {"div", "integer_pow", "rem", "rsqrt", "sqrt"}

#: Views that name the elements of an operand anew, in their order: other names of its memory.
ALIASES = _names("bitcast_convert_type expand_dims name optimization_barrier reshape squeeze")

#: Elementwise operators whose result has its elements in another order than an operand, or other ones.
MOVING = (VIEWS - ALIASES) | _names("concatenate dynamic_slice gather pad stack")

#: Views through which a matrix product reads an operand.
READ_BY_PRODUCTS = _names("slice transpose")

#: Operators that read some elements of an operand, not all that is there.
LOOKUPS = _names("dynamic_slice gather")

#: Operators that put the parts of an array together that the shards of a ``shard_map`` have.
SHARD_GATHERS = _names("all_gather all_gather_invariant all_gather_reduced")

#: Operators that move elements, compute nothing, and add none: a share of them that is zero stays so.
MOVES = VIEWS | _names("concatenate convert_element_type")

#: Sums of two values.
ADDITIONS = _names("add add_any")

#: Operators that are linear in all that they read together, and those that are in the first alone.
LINEAR = ADDITIONS | REARRANGES | _names("call_boundary concatenate convert_element_type copy name neg reduce_sum")
LINEAR |= _names("rev select_n slice split stack sub")
SCALINGS = _names("div mul")

#: Operators that give zero for zero.
KEEPS_ZERO = _names("broadcast_in_dim convert_element_type copy neg reshape")

#: Draws of random numbers, and keys made of keys.
DRAWS = _names("random_bits random_gamma rng_bit_generator threefry2x32")
RANDOM = _names("random_bits random_fold_in random_seed random_split threefry2x32")

#: Operators that run a program, by the parameter that holds it: calls, which are no more than that; functions with a
#: derivative of their own; checkpoints; loops and branches; programs of each shard; and all of these.
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
FUNCTIONS = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
CHECKPOINTS = {"checkpoint": "jaxpr", "remat": "jaxpr", "remat2": "jaxpr"}
CONTROL = {"cond": "branches", "scan": "jaxpr", "while": "body_jaxpr"}
SHARDS = {"shard_map": "jaxpr"}
BODIES = {**CALLS, **FUNCTIONS, **CHECKPOINTS, **CONTROL, **SHARDS}

#: Calls whose body is compiled with what is around them.
JITS = _names("jit pjit")

#: Programs that are not fused with what they read.
LOOPS = frozenset(CHECKPOINTS) | frozenset(CONTROL) | {"custom_vjp_call"}

#: Operators that say how an array is split, and compute nothing.
MARKS = _names("mesh_cast pcast pvary reshard sharding_constraint")
