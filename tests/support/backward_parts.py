"""A backward pass in its two parts, as stages run it."""

from jaxpipe.residuals.vjp_program import run_backward


def seeds_of(built, cotangents):
    """Cotangents of outputs by tensor; those of an output that is returned twice add up, None is zero."""
    seeds = {}
    for t, value in zip(built.backward_graph.source.outputs, cotangents, strict=True):
        if value is not None:
            seeds[t] = seeds[t] + value if t in seeds else value
    return seeds


def backward_in_parts(built, parameters, stash, cotangents, **options):
    """Return the cotangents that the two parts make, each by tensor."""
    seeds, keep = seeds_of(built, cotangents), built.saved
    early = run_backward(built, built.input_steps, parameters, stash, seeds, keep=keep, **options)
    saved = {t: early[t] for t in built.saved if t in early}
    late = run_backward(built, built.weight_steps, parameters, stash, saved, keep=keep, **options)
    return {t: early.get(t) for t in built.input_part}, {t: late.get(t) for t in built.weight_part}
