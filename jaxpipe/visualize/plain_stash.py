"""Tensors that the stages of a program would keep for their backward pass without any codec."""

from dataclasses import replace

from jaxpipe.graph.allowed_codecs import parse
from jaxpipe.runtime.stages import Program, with_backward
from jaxpipe.runtime.uint32_words import word_count


def plain_stash_bytes(program: Program) -> tuple[int, ...]:
    """By stage, what ``jax.grad`` keeps of one micro-batch: decorations and the plan's storage are not looked at."""
    stages = []
    for stage in program.stages:
        operators = tuple(replace(op, policy=None) for op in stage.graph.operators)
        stages.append(replace(stage, graph=replace(stage.graph, operators=operators)))
    plain = with_backward(program.objective, stages, parse(()))
    return tuple(sum(4 * word_count(a) for a in stage.stash_avals) for stage in plain)
