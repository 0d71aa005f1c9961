"""Measure the distance of compiled float32 gradients from float64 ones: plain, encoded, and plain with a barrier.

    python -m scripts.check_rounding
    python -m scripts.check_rounding --models ViT-B --out out/rounding.json

XLA fuses an encoded program otherwise than a plain one, so that sums are rounded otherwise. The plain gradient
with all numbers in float64 decides which of two results is nearer to the truth. Errors are in units in the last place
(of float32) of an array's largest entry, the largest over all arrays that are not rounding errors themselves, and
as the relative L2 norm over all parameters. Dropout leaves out the same elements in both precisions.
"""

import argparse
import json
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from scripts.bench_encoding import PLAIN, ROUNDING, VARIANTS, Variant
from scripts.encoding_cases import CASES, Problem
from scripts.measuring import header


def gradients(problem: Problem, variant: Variant, arguments: Any) -> list[np.ndarray]:
    """Return the gradients of one compiled step."""
    step = jax.jit(jax.value_and_grad(variant.loss(problem), has_aux=True))
    return [np.asarray(x) for x in jax.tree.leaves(jax.device_get(step(*arguments)[1]))]


def widened(x: Any) -> Any:
    """A float32 array as float64; everything else as it is."""
    return np.asarray(x, np.float64) if getattr(x, "dtype", None) == np.float32 else x


def drawn(key: Any, p: Any, shape: Any = None) -> Any:
    """``jax.random.bernoulli`` with the bits that it has where numbers are of 32 bits."""
    return jax.random.uniform(key, shape, jnp.float32) < jnp.float32(p)


def errors(found: list[np.ndarray], truth: list[np.ndarray]) -> dict[str, float]:
    """Largest error in ulps, and relative L2 norm."""
    largest = max(float(np.max(np.abs(b))) for b in truth)
    ulps = squares = scale = 0.0
    for a, b in zip(found, truth, strict=True):
        difference, size = a.astype(np.float64) - b, float(np.max(np.abs(b)))
        squares, scale = squares + float(np.sum(difference**2)), scale + float(np.sum(b**2))
        if size > ROUNDING * largest:
            ulps = max(ulps, float(np.max(np.abs(difference))) / float(np.spacing(np.float32(size))))
    return {"ulps": ulps, "relative_l2": (squares / scale) ** 0.5}


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["ViT-B", "GPT-2"], choices=[case.name for case in CASES])
    parser.add_argument("--variants", nargs="+", default=["fast", "barrier"], choices=list(VARIANTS))
    parser.add_argument("--out", type=Path, default=Path("out/rounding.json"))
    options = parser.parse_args()
    rows = []
    for case in (case for case in CASES if case.name in options.models):
        problem = case.make(case.batch)
        chosen = {"plain": PLAIN, **{name: VARIANTS[name] for name in options.variants}}
        gradients_of = {name: gradients(problem, variant, problem.arguments) for name, variant in chosen.items()}
        jax.config.update("jax_enable_x64", True)
        with mock.patch.object(jax.random, "bernoulli", drawn):
            truth = gradients(problem, PLAIN, jax.tree.map(widened, problem.arguments))
        jax.config.update("jax_enable_x64", False)
        assert all(x.dtype == np.float64 for x in truth), "some gradient was not computed in float64"
        row = {name: errors(values, truth) for name, values in gradients_of.items()}
        rows.append({"model": case.name, "batch": case.batch, "errors": row})
        for name, error in row.items():
            print(f"{case.name:8} {name:10} {error['ulps']:8.1f} ulps  {error['relative_l2']:.2e}", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**header(), "rows": rows}, indent=1))
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
