"""PyTorch's side of ``scripts.compare_peers``: one worker, in an environment that has torch. Prints a line of JSON.

python scripts/peers_torch.py pipelining mlp 256 128 8 20
"""
# pyright: reportMissingImports=false

import argparse
import ctypes
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn


LAYERS, CHANNELS, SIDE, CLASSES = 8, 32, 16, 10
MEMORY_ROUNDS = 5


def layers(model: str, width: int) -> list[nn.Module]:
    """The model as a list: what ``scripts.compare_peers`` has in JAX."""
    if model == "mlp":
        return [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)]
    convs = [nn.Sequential(nn.Conv2d(3 if k == 0 else CHANNELS, CHANNELS, 3, padding=1), nn.ReLU()) for k in range(7)]
    return [*convs, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, CLASSES))]


def data(model: str, width: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets."""
    shape = (rows, width) if model == "mlp" else (rows, 3, SIDE, SIDE)
    return torch.randn(shape), torch.randn(rows, width if model == "mlp" else CLASSES)


def resident(field: str) -> int:
    """Bytes of this process in memory: ``VmRSS`` now, ``VmHWM`` at the most since ``forget_peak``."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    match = re.search(rf"{field}:\s+(\d+) kB", text)
    assert match is not None
    return 1024 * int(match[1])


def forget_peak() -> None:
    """Give free memory back, and let ``VmHWM`` begin at what is in memory then."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def single(model: str, width: int, rows: int, microbatches: int) -> Callable[[], object]:
    """Gradient accumulation on one device."""
    net = nn.Sequential(*layers(model, width))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x, y = data(model, width, rows * microbatches)

    def step() -> None:
        optimizer.zero_grad()
        for a, b in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
            (nn.functional.mse_loss(net(a), b) / microbatches).backward()
        optimizer.step()

    return step


def gpipe(model: str, width: int, rows: int, microbatches: int) -> Callable[[], object]:
    """torchgpipe with two partitions on the CPU, nothing computed again."""
    from torchgpipe import GPipe

    net = GPipe(
        nn.Sequential(*layers(model, width)),
        balance=[LAYERS // 2] * 2,
        devices=["cpu", "cpu"],
        chunks=microbatches,
        checkpoint="never",
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x, y = data(model, width, rows * microbatches)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()

    return step


def pipelining(model: str, width: int, rows: int, microbatches: int) -> Callable[[], object]:
    """torch.distributed.pipelining over Gloo, 1F1B; one of two processes."""
    from torch import distributed
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    half = layers(model, width)[rank * LAYERS // 2 : (rank + 1) * LAYERS // 2]
    net = nn.Sequential(*half)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    stage = PipelineStage(net, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=microbatches, loss_fn=nn.functional.mse_loss)
    x, y = data(model, width, rows * microbatches)

    def step() -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=[])
        optimizer.step()
        distributed.barrier()

    return step


def main() -> None:
    """Run one worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=["single", "gpipe", "pipelining"])
    parser.add_argument("model", choices=["mlp", "cnn"])
    for name in ("width", "rows", "microbatches", "rounds"):
        parser.add_argument(name, type=int)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    rank = int(os.environ.get("RANK", "0"))
    if options.tool != "gpipe":
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    before = resident("VmRSS")
    makers = {"single": single, "gpipe": gpipe, "pipelining": pipelining}
    step = makers[options.tool](options.model, options.width, options.rows, options.microbatches)
    step()
    forget_peak()
    for _ in range(MEMORY_ROUNDS):
        step()
    result = {"rank": rank, "bytes": resident("VmHWM") - before, "torch": torch.__version__}
    if options.tool != "single":
        alone = single(options.model, options.width, options.rows, options.microbatches)
        steps = {"single": (alone, cores[rank % len(cores) :][:1]), "seconds": (step, None)}
        meet = torch.distributed.barrier if options.tool == "pipelining" else lambda: None
        seconds = alternate(steps, options.rounds, os.sched_getaffinity(0), meet)
        result |= seconds
    print(json.dumps(result), flush=True)


def alternate(
    steps: dict[str, Any], rounds: int, cores: set[int], meet: Callable[[], object]
) -> dict[str, list[float]]:
    """Measure seconds of steps that take turns, each on cores of its own or on all; processes meet before each."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 3):
        for name, (step, pinned) in steps.items():
            os.sched_setaffinity(0, pinned or cores)
            meet()
            start = time.perf_counter()
            step()
            if number >= 3:
                times[name].append(time.perf_counter() - start)
    return times


if __name__ == "__main__":
    main()
