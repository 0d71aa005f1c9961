"""``partition_layers``: cut a profiled program into stages and put them on the devices of a network."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from jaxpipe.costs.network import Network
from jaxpipe.costs.profile import Profile
from jaxpipe.errors import MemoryBudgetError, PartitionError
from jaxpipe.planning.cuts.choose_plan import all_plans, chosen, least_bytes, move_operators
from jaxpipe.planning.cuts.cost_models import Plans, Synchronous
from jaxpipe.planning.cuts.cut_space import CutSpace, cut_space
from jaxpipe.planning.cuts.layouts import Limits, device_classes
from jaxpipe.planning.cuts.placed_stages import Partition, cost_stages, in_order_of_stages, step_bound
from jaxpipe.planning.cuts.published import Bottleneck, MinMax, PipeDream, Throughput, cheapest_bottleneck
from jaxpipe.planning.cuts.shortest_step import least_memory, shortest_step
from jaxpipe.text.units import bytes_text, parse_bytes


#: Micro-batches of a step, for ``"synchronous"``, if the caller does not say.
MICROBATCHES = 32


#: The cost models, by the value of ``cost_model=``.
MODELS: dict[str, type[Bottleneck | Synchronous]] = {
    model.name: model for model in (PipeDream, MinMax, Throughput, Synchronous)
}


def partition_layers(
    profile: Profile,
    network: Network,
    *,
    cost_model: Literal["synchronous", "min_max", "throughput", "pipedream"] = "synchronous",
    memory: float | str | Sequence[float] | None = None,
    replicate: bool | int | Sequence[int] = True,
    num_microbatches: int | None = None,
    num_stages: int | None = None,
    idle: bool = True,
    reorder: bool = True,
    slack: float = 0.0,
    starts: Sequence[int] = (),
) -> Partition:
    """Choose stages, and devices for each, so that the slowest part of the pipeline is as fast as can be.

    Devices may stay idle. Every answer says how it was searched for and how far from a lower bound it is.

    Args:
      profile: what each operator costs for one micro-batch.
      network: the devices.
      cost_model: what is made small. With ``C`` a stage's seconds, ``W`` its parameter bytes, ``a`` the bytes that
        cross a cut, on ``k`` devices with bandwidth ``B``:
        ``"synchronous"``, a whole step of 1F1B on devices that run free, calls, sends, fill and drain included;
        ``"min_max"``, the largest ``C / k`` and ``2 a / B``, ``B`` that of the slowest link between two stages;
        ``"throughput"``, the largest ``(C + 2 sum(a) / B) / k + 4 (k-1) / k W / (M B)`` (Piper, NeurIPS 2021);
        ``"pipedream"``, the largest ``(C + 4 (k-1) W / (B k)) / k`` and ``2 a / (B k)`` (PipeDream, SOSP 2019).
      memory: bytes of each device, a text such as ``"8GiB"``, or one number for each device; the network's own
        ``memory_bytes`` holds too. A stage keeps ``ceil(devices from here on / k)`` micro-batches' residuals and its
        parameters; with ``"synchronous"`` gradients too.
      replicate: whether a stage may have several devices; a number: how many each has; numbers: how many each stage
        has, first to last.
      num_microbatches: of a step, on all replicas together; ``"throughput"`` needs it, ``"synchronous"`` takes 32 if
        left out.
      num_stages: how many stages; needs ``replicate=False`` or a number.
      idle: whether devices may be left without a stage.
      reorder: whether operators that do not depend on each other may change places.
      slack: by what share of the best an answer may be worse, if it sends less.
      starts: operators at which stages begin, whatever else; needs ``reorder=False``.

    Raises:
      PartitionError: if the model does not know what was asked, or there are too few places to cut or devices.
      MemoryBudgetError: if nothing fits, with the smallest budget that works.

    Example:
      >>> profile = Profile.chain("abcd", [1, 1, 1, 1], [2, 2, 2, 2], [0] * 4, [0] * 4, [8, 2, 8, 0])
      >>> partition = partition_layers(profile, Network.uniform(2, 1.0), cost_model="min_max", replicate=False)
      >>> [(stage.operators, stage.devices) for stage in partition.stages], partition.bottleneck_seconds
      ([(range(0, 2), (0,)), (range(2, 4), (1,))], 6.0)
    """
    _check_arguments(profile, network, cost_model, num_microbatches)
    replicate = replicate if isinstance(replicate, bool | int) else tuple(replicate)
    held, limits = _memory(network, memory), _limits(network, replicate, num_stages)
    limits = limits if idle else _without_idle(network.num_devices, limits)
    model = _cost_model(profile, network, cost_model, num_microbatches, held)
    space, classes = cut_space(profile, reorder=reorder, starts=starts), device_classes(network, held)
    plans = all_plans(space, classes, limits)
    if plans is None and isinstance(model, Synchronous) and not space.is_chain:
        space = cut_space(profile, reorder=False)

    if plans is not None:
        best = chosen(space, model, plans, slack, "all placements")
    elif isinstance(model, Synchronous):
        best = shortest_step(space, model, classes, limits, slack)
    else:
        best = cheapest_bottleneck(space, model, classes, limits, slack)
    if best is None:
        raise _nothing_fits(profile, space, model, limits, plans, num_stages)
    seconds, cuts, layout = best.seconds, best.cuts, best.layout
    if isinstance(model, Synchronous):
        bound = step_bound(profile, network, model.m, limits.totals[-1], max(limits.group_sizes))
    else:
        bound = sum(profile.seconds) / sum(sorted(network.speed)[::-1][: limits.totals[-1]])
    if space.complete or not reorder:
        bound = max(bound, best.bound)
    else:
        space, seconds = move_operators(profile, space, model, cuts, layout, seconds)
        cuts = np.arange(len(cuts))
    which = "all cuts" if space.complete else "one order's cuts" if reorder else "the cuts of the given order"
    return Partition(
        stages=cost_stages(model, space, cuts, layout),
        order=in_order_of_stages(space, cuts),
        bottleneck_seconds=seconds,
        lower_bound_seconds=min(bound, seconds),
        ties=best.ties,
        searched=f"{which}, {best.placements}",
        cost_model=cost_model,
        num_microbatches=model.num_microbatches,
        memory=tuple(None if size == math.inf else size for size in held),
        replicate=replicate,
        num_stages=num_stages,
        reorder=reorder,
        slack=slack,
        profile=profile,
        network=network,
        idle=idle,
        starts=tuple(starts),
    )


def _check_arguments(profile: object, network: object, cost_model: str, num_microbatches: int | None) -> None:
    if not isinstance(profile, Profile):
        raise PartitionError(f"profile is {type(profile).__name__}; it must be a jaxpipe.Profile.")
    if not isinstance(network, Network):
        raise PartitionError(f"network is {type(network).__name__}; it must be a jaxpipe.Network.")
    if cost_model not in MODELS:
        raise PartitionError(f"cost_model={cost_model!r}; it must be one of {', '.join(map(repr, MODELS))}.")
    if num_microbatches is not None and num_microbatches < 1:
        raise PartitionError(f"num_microbatches={num_microbatches}; it must be at least 1.")


def _cost_model(
    profile: Profile, network: Network, name: str, num_microbatches: int | None, held: tuple[float, ...]
) -> Bottleneck | Synchronous:
    model = MODELS[name](network, num_microbatches, held if min(held) < math.inf else ())
    if isinstance(model, Synchronous):
        return replace(model, num_microbatches=num_microbatches or MICROBATCHES, frozen=bool(profile.frozen))
    model.check()
    return model


def _memory(network: Network, memory: float | str | Sequence[float] | None) -> tuple[float, ...]:
    """Return the bytes of each device."""
    count = network.num_devices
    given = (memory,) * count if isinstance(memory, str | int | float) else memory
    budget = (math.inf,) * count if given is None else tuple(float(parse_bytes(m)) for m in given)
    if len(budget) != count:
        raise MemoryBudgetError(f"memory has {len(budget)} entries, the network has {count} devices; give one each.")
    return tuple(map(min, budget, network.memory_bytes))


def _limits(network: Network, replicate: bool | int | tuple[int, ...], num_stages: int | None) -> Limits:
    count = network.num_devices
    if replicate is True:
        if num_stages is not None:
            raise PartitionError(
                f"num_stages={num_stages} needs to know how many devices each stage has: pass replicate=False for one, "
                "or a number."
            )
        return Limits(tuple(range(1, count + 1)), range(1, count + 1))
    if isinstance(replicate, tuple):
        if not replicate or min(replicate) < 1 or sum(replicate) > count or num_stages not in (None, len(replicate)):
            raise PartitionError(
                f"replicate={replicate}: each of {num_stages or len(replicate)} stage(s) needs one device at least, "
                f"{sum(replicate)} in all, and the network has {count}."
            )
        return Limits(tuple(sorted(set(replicate))), (sum(replicate),), replicate)
    size = int(replicate) or 1
    if size < 1 or (num_stages is not None and num_stages < 1) or size * (num_stages or 1) > count:
        raise PartitionError(
            f"num_stages and replicate need {num_stages or 1} stage(s) of {size} device(s) each, but the network has "
            f"{count} devices."
        )
    return Limits((size,), range(1, count + 1) if num_stages is None else (num_stages * size,))


def _without_idle(count: int, limits: Limits) -> Limits:
    """Return the limits of stages that use all devices, if they can."""
    if count not in limits.totals or (len(limits.group_sizes) == 1 and count % limits.group_sizes[0]):
        raise PartitionError(
            f"Stages as replicate and num_stages demand cannot use all {count} devices of the network. "
            "Pass other values, or let devices be idle (idle=True)."
        )
    return replace(limits, totals=(count,))


def _nothing_fits(
    profile: Profile,
    space: CutSpace,
    model: Bottleneck | Synchronous,
    limits: Limits,
    plans: list[Plans] | None,
    num_stages: int | None,
) -> Exception:
    free = replace(model, memory=())
    if plans is not None:
        least = least_bytes(space, free, plans)
    else:
        least = least_memory(space if space.is_chain else cut_space(profile, reorder=False), free, limits)
    if least == math.inf or not model.memory:
        return PartitionError(
            f"No {num_stages or 'possible'} stages were found: the profile has {len(space.crossing) - 2} places "
            "to cut, and devices of one stage, or of two that follow each other, need a link (bandwidth above 0). Use "
            "fewer stages, fewer devices in each, or a network with more links."
        )
    given = sorted(set(model.memory))
    text = bytes_text(given[0]) if len(given) == 1 else f"{bytes_text(given[0])} to {bytes_text(given[-1])}"
    return MemoryBudgetError(
        f"memory={text}: no stages fit. The smallest budget for every device with which there is a plan is "
        f"{math.ceil(least)} bytes ({bytes_text(least)}); smaller micro-batches or more devices need less."
    )
