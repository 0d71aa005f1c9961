"""Seconds of training steps on a TPU: by jaxpipe's rates, by XLA's own estimate, and of the products alone.

    JAX_PLATFORMS=cpu python -m scripts.check_target_seconds
    ... python -m scripts.check_target_seconds --models GPT-2 ViT-B --bfloat16

XLA:TPU writes into a compiled program how many cycles it estimates for each fused operator; their sum over the clock is
the estimate. The chip need not be here, and nothing runs. The steps are the plain ones of ``scripts.bench_encoding``.
"""

import argparse
import gc
import json
import re
import sys
from pathlib import Path
from typing import Any

import jax

from jaxpipe.costs.count_products import count_products
from jaxpipe.costs.kernels import program_cost
from jaxpipe.graph.graph import read_graph
from jaxpipe.targets.absent import absent_devices
from jaxpipe.targets.building import building_for
from jaxpipe.targets.known import target_named
from scripts.bench_encoding import PLAIN
from scripts.check_target_encoding import in_bfloat16, on_device
from scripts.encoding_cases import CASES_BY_NAME, Case
from scripts.measuring import header


#: Cycles in a second of a v5e: its peak of 197 tera-operations over two for each cell of four units of 128 x 128.
CLOCK = 197e12 / (2 * 4 * 128 * 128)
PEAK = 197e12


def measure(case: Case, bfloat16: bool) -> dict[str, Any]:
    """Return the three times of one model's step."""
    target = target_named("v5e")
    with jax.default_device(jax.devices("cpu")[0]):
        problem = in_bfloat16(case.make(case.batch)) if bfloat16 else case.make(case.batch)
    arguments = on_device(problem.arguments, absent_devices(target, 1)[0])
    with building_for(target):
        traced = jax.jit(jax.value_and_grad(PLAIN.loss(problem), has_aux=True)).trace(*arguments)
    cycles = map(int, re.findall(r'estimated_cycles":"(\d+)"', traced.lower().compile().as_text()))
    seconds = {
        "jaxpipe": program_cost(read_graph(traced.jaxpr), target.rates)[1],
        "xla": sum(cycles) / CLOCK,
        "products_at_peak": count_products(traced.jaxpr)[1] / PEAK,
    }
    return {"name": case.name + " bfloat16" * bfloat16, "batch": case.batch, "seconds": seconds}


def main() -> None:
    """Compile, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES_BY_NAME, default=["GPT-2 8x512"], metavar="NAME")
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("out/seconds-v5e.json"))
    arguments = parser.parse_args()
    known = (
        {row["name"]: row for row in json.loads(arguments.out.read_text())["rows"]} if arguments.out.exists() else {}
    )
    for name in arguments.models:
        row = measure(CASES_BY_NAME[name], arguments.bfloat16)
        known[row["name"]] = row
        print(row["name"], {key: f"{1e3 * x:.1f} ms" for key, x in row["seconds"].items()}, file=sys.stderr, flush=True)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        result = {**header(), "device": "TPU v5 lite", "rows": list(known.values())}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        jax.clear_caches()
        gc.collect()


if __name__ == "__main__":
    main()
