"""Steps of stages that wait in place of computing, against their plans: what the runtime itself loses.

    python -m scripts.bench_waiting --out docs/results/waiting-cpu-jax0.12.json
    chrt -f 5 python -m scripts.bench_waiting  # as root, on a machine that has other work: waits end in time

Every layer multiplies rows by a vector, and waits in its forward and in its backward pass for as long as its profile
says. Waiting takes no core, so that simulated devices really work at the same time, however few cores there are: a
measured step has the order of the work, the overlap of messages and swaps, and what calls and sends cost. It has no
arithmetic to speak of, and its links are copies in memory. The wait is compiled here (a C++ compiler is needed), for
XLA:CPU runs programs with Python callbacks one after the other, on all devices.

  swaps      four stages, all forward passes first, of which one is over its budget: stashes go to a peer and come back
  replicas   a layer as heavy as all others: a device for each of four stages, and three for one stage and one for the
             other (``devices_per_stage=(3, 1)``), with the cuts that the plan chooses

  predicted  seconds of a step in the plan
  measured   quartiles; ratio: their median over what was predicted
  bytes      of each device: predicted, and what the compiled programs and their arrays take, beside the budget
"""

import argparse
import ctypes
import dataclasses
import functools
import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpipe
from scripts.measuring import alternate, header, quartiles


DEVICES, MICROBATCHES, ROWS, WIDTH = 4, 24, 128, 512

#: Seconds of a light layer on a micro-batch.
FORWARD, BACKWARD = 0.01, 0.02

#: Of each link, bytes per second.
BANDWIDTH = 1e9

#: Layers of a chain, how many times heavier each is than a light one.
LIGHT = (1,) * 8

#: Threads of XLA:CPU: one for each device and for copies between them.
THREADS = 4 * DEVICES

SOURCE = """
#include <chrono>
#include <cstring>
#include <thread>
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
static ffi::Error Wait(double seconds, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  std::memcpy(y->untyped_data(), x.untyped_data(), x.size_bytes());
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(WaitHandler, Wait,
    ffi::Ffi::Bind().Attr<double>("seconds").Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
"""


def register_wait() -> None:
    """Compile ``SOURCE`` and tell XLA of it."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "wait.cc"), Path(folder, "wait.so")
        source.write_text(SOURCE, encoding="utf-8")
        compiler = [os.environ.get("CXX", "g++"), "-std=c++17", "-w", "-shared", "-fPIC", "-I", jax.ffi.include_dir()]
        subprocess.run([*compiler, "-o", str(library), str(source)], check=True)
        handler = ctypes.CDLL(str(library)).WaitHandler
    jax.ffi.register_ffi_target("wait", jax.ffi.pycapsule(handler), platform="cpu")


def wait(x: jax.Array, seconds: float) -> jax.Array:
    """Return an array after some seconds."""
    return jax.ffi.ffi_call("wait", jax.ShapeDtypeStruct(x.shape, x.dtype))(x, seconds=np.float64(seconds))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def layer(heavy: int, w: jax.Array, x: jax.Array) -> jax.Array:
    """Multiply by a vector, and wait as long as so many light layers."""
    return wait(x * w, heavy * FORWARD)


def _forward(heavy: int, w: jax.Array, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return layer(heavy, w, x), (w, x)


def _backward(heavy: int, kept: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    w, x = kept
    cotangent = wait(cotangent, heavy * BACKWARD)
    return (cotangent * x).sum(0), cotangent * w


layer.defvjp(_forward, _backward)


def pipeline(heavy: tuple[int, ...], **options: Any) -> jaxpipe.Pipeline:
    """A chain of layers, planned with the seconds that they wait."""

    def apply(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for k, (w, times) in enumerate(zip(weights, heavy, strict=True)):
            with jax.named_scope(f"layer{k}"):
                x = layer(times, w, x)
        return x

    def loss(model: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        return jnp.square(model(x)).mean()

    model = jax.tree_util.Partial(apply, [jnp.ones((WIDTH,))] * len(heavy))
    batch = jax.ShapeDtypeStruct((MICROBATCHES * ROWS, WIDTH), jnp.float32)
    mesh = jax.make_mesh((DEVICES,), ("stage",))
    options = {"optimizer": optax.sgd(0.1), "num_microbatches": MICROBATCHES, "runtime": "mpmd", **options}
    profile = jaxpipe.profile_model(model, batch, loss=loss, source="analytic", num_microbatches=MICROBATCHES)
    assert profile.names[: len(heavy)] == tuple(f"layer{k} layer" for k in range(len(heavy)))
    nothing = (0.0,) * (len(profile.names) - len(heavy))
    profile = dataclasses.replace(
        profile,
        forward_seconds=(*(times * FORWARD for times in heavy), *nothing),
        backward_seconds=(*(times * BACKWARD for times in heavy), *nothing),
        source="given",
    )
    return jaxpipe.partition(model, mesh, batch, loss=loss, profile=profile, **options)


def swapping() -> jaxpipe.Pipeline:
    """Four equal stages with all forward passes first, too many stashes of the last one among them."""
    options = {
        "schedule": "gpipe",
        "network": jaxpipe.Network.uniform(DEVICES, BANDWIDTH),
        "options": jaxpipe.PlanOptions(compile=False),
    }
    plan = pipeline(LIGHT, **options).plan
    return pipeline(LIGHT, memory=plan.predicted_bytes - MICROBATCHES // 2 * plan.stages[0].stash_bytes, **options)


def replicated(replicate: tuple[int, ...]) -> jaxpipe.Pipeline:
    """A layer as heavy as all others together, on stages with so many devices each."""
    return pipeline(
        (len(LIGHT), *LIGHT), schedule="1f1b", options=jaxpipe.PlanOptions(devices_per_stage=replicate, compile=False)
    )


def stepper(trained: jaxpipe.Pipeline) -> Callable[[], object]:
    """A training step that goes on from the one before."""
    batch = jax.random.normal(jax.random.key(0), (MICROBATCHES * ROWS, WIDTH))
    held = [trained.init(jax.random.key(0))]

    def step() -> object:
        held[0], metrics = trained.step(held[0], batch)
        return metrics["loss"], held[0].parameters

    return step


def main() -> None:
    """Measure, write the JSON file and print what it says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="steps of each pipeline (default 10)")
    parser.add_argument("--out", type=Path, default=Path("out/bench_waiting.json"))
    options = parser.parse_args()
    os.environ.setdefault("NPROC", str(THREADS))  # read when the first device is made
    jax.config.update("jax_num_cpu_devices", DEVICES)
    register_wait()
    ones = (1,) * DEVICES
    cases = {"no swaps": pipeline(LIGHT, schedule="1f1b"), "swaps": swapping()}
    cases |= {str(replicate): replicated(replicate) for replicate in (ones, (DEVICES - 1, 1))}
    times = alternate({name: stepper(case) for name, case in cases.items()}, options.rounds, float("inf"))
    rows = {}
    for name, case in cases.items():
        predicted, measured = case.plan.step_seconds, quartiles(times[name])
        rows[name] = {"predicted": predicted, "measured": measured, "ratio": measured[1] / predicted}
        rows[name] |= {
            "away": [stage.away for stage in case.plan.stages],
            "devices": case.plan.stage_replicas.per_stage,
        }
        rows[name] |= {"cuts": [stage.operators[0] for stage in case.plan.stages[1:]]}
        report = case.memory_report()
        rows[name] |= {"budget": case.plan.budget, "predicted_bytes": report.predicted_bytes}
        rows[name] |= {"compiled_bytes": report.compiled_bytes}
        print(f"{name}: {measured[1]:.3f} s measured, {predicted:.3f} s predicted ({measured[1] / predicted:.3f})")
    single, three = (rows[str(replicate)] for replicate in (ones, (DEVICES - 1, 1)))
    speedup = {
        "predicted": single["predicted"] / three["predicted"],
        "measured": single["measured"][1] / three["measured"][1],
    }
    print(f"speed-up of {(DEVICES - 1, 1)}: {speedup['measured']:.3f} measured, {speedup['predicted']:.3f} predicted")
    result = {**header(), "microbatches": MICROBATCHES, "layer_seconds": [FORWARD, BACKWARD], "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**result, "speedup": speedup}, indent=1) + "\n")


if __name__ == "__main__":
    main()
