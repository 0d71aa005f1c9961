"""The search for the level of a step within a budget, of levels whose bytes are known beforehand."""

import numpy as np
import pytest

from jaxpipe.step.fit_step import fitting_level
from jaxpipe.step.step_front import BY_JAX, DEFAULT, PLAIN, SMALLEST
from jaxpipe.step.step_variants import Needs


ROOMS = tuple(f"room {k} of 16" for k in range(1, 16))
BESIDES, PRODUCTS = 1000, 50  # bytes besides storage, and products of the plain step


class Front:
    """Levels with random estimates; rooms are in the order of bytes and of products."""

    first = DEFAULT

    def __init__(self, seed):
        random = np.random.default_rng(seed)
        sizes = np.sort(random.integers(100, 1000, len(ROOMS) + 3))[::-1]
        reruns = np.sort(random.integers(0, 40, len(sizes)))
        self.row = "reruns 0 of 8", DEFAULT, *ROOMS, SMALLEST
        rows = dict(zip(self.row, zip(map(int, sizes), map(int, reruns), strict=True), strict=True))
        place = random.integers(2, len(sizes))
        by_hand = {"every block": (int(sizes[place]) + 1, int(reruns[place - 1]))}
        self.hand_placed = tuple(by_hand)
        self.rows = rows | by_hand | {PLAIN: (2000, 0)}

    def is_by_jax(self, level):
        return level.endswith(BY_JAX)

    def bytes(self, level):
        return self.rows[level][0]

    def reruns(self, level):
        return self.rows[level][1]

    def seconds(self, level):
        return float(self.rows[level][1])

    estimate = bytes


class Variants:
    """A step whose levels need what they are estimated to, and other bytes besides."""

    programs = ("loss",)

    def __init__(self, front, wrong=0.0):
        self.front, self.wrong, self.known = front, wrong, {}

    def real(self, level):
        size, reruns = self.front.rows[level]
        return Needs(int(BESIDES + (1 + self.wrong) * size), PRODUCTS + reruns)

    def needs(self, level):
        return self.known.setdefault(level, self.real(level))

    def fewest(self, budget):
        """The products of the best level, of all."""
        within = [self.real(level) for level in self.front.rows if self.real(level).bytes <= budget]
        return min((needs.products for needs in within), default=None)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("wrong", [0.0, 0.3, -0.3])
def test_the_fewest_products_within_a_budget(seed, wrong):
    for share in (0.95, 0.8, 0.6, 0.45, 0.3):
        variants = Variants(Front(seed), wrong)
        budget = int(share * variants.real(PLAIN).bytes)
        level, best = fitting_level(variants, budget), variants.fewest(budget)
        assert (level is None) == (best is None)
        if level is not None:
            assert variants.real(level).bytes <= budget
            # Of a budget 3 % may be left.
            assert variants.real(level).products <= (variants.fewest(int(0.97 * budget)) or np.inf)
        # Before a refusal more small levels are compiled where estimates are wrong.
        assert len(variants.known) <= (4 if not wrong else 6 if level is not None else 7)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("wrong", [0.0, 0.3, -0.3])
def test_larger_budgets_run_no_more_products(seed, wrong):
    front, products = Front(seed), []
    for budget in range(1100, 2100, 50):
        variants = Variants(front, wrong)  # that knows nothing of other budgets
        level = fitting_level(variants, budget)
        products += [] if level is None else [variants.real(level).products]
    assert products == sorted(products, reverse=True)


def test_checkpoints_of_jax_are_tried_before_a_refusal():
    front, every, second = Front(0), "every block" + BY_JAX, "every second block" + BY_JAX
    front.hand_placed += every, second
    front.rows |= {every: (1500, 60), second: (1540, 30)}  # by estimates, more than default storage
    variants = Variants(front)
    needs = {every: Needs(BESIDES + 50, 110), second: Needs(BESIDES + 90, 80)}
    variants.real = lambda level: needs.get(level) or Variants.real(variants, level)
    assert min(size for level, (size, _) in front.rows.items() if level not in needs) > 100
    assert fitting_level(variants, BESIDES + 95) == second  # predicted from the first
    assert variants.known.keys() >= needs.keys() | {SMALLEST}


def test_a_checkpoint_of_jax_is_tried_whatever_else_was():
    """Estimates of small rooms may promise so much that all tries are spent on them."""
    front, every = Front(0), "every block" + BY_JAX
    front.hand_placed += (every,)
    front.rows |= {every: (1500, 60)} | {room: (50 - k, 45) for k, room in enumerate(ROOMS)}
    variants = Variants(front)
    needs = {every: Needs(BESIDES + 50, 110)}
    variants.real = lambda level: needs.get(level) or Needs(BESIDES + 110, 90)
    variants.known[PLAIN] = Needs(3000, PRODUCTS)
    assert fitting_level(variants, BESIDES + 95) == every


def test_levels_that_store_the_same_are_compiled_once():
    variants = Variants(Front(0))
    variants.front.rows |= dict.fromkeys((*ROOMS, SMALLEST), (300, 30)) | {"every block": (700, 30)}
    assert fitting_level(variants, BESIDES + 290) is None
    assert SMALLEST in variants.known and variants.known.keys().isdisjoint(ROOMS)


@pytest.mark.parametrize("budget", [BESIDES + 60, 1900])
def test_default_storage_without_barriers_is_tried(budget):
    """On a CPU the first level is default storage behind barriers, which may need more."""
    variants = Variants(Front(0))
    variants.front.first = "room 0 of 16"
    variants.front.row = "room 0 of 16", *ROOMS, SMALLEST
    variants.front.rows["room 0 of 16"] = (950, 0)
    small = Needs(BESIDES + 50, PRODUCTS)
    variants.real = lambda level: small if level == DEFAULT else Variants.real(variants, level)
    assert variants.real("room 0 of 16").bytes > 1900 and variants.real("room 1 of 16").products > PRODUCTS
    assert fitting_level(variants, budget) == DEFAULT
    assert SMALLEST not in variants.known


@pytest.mark.parametrize("room", ["room 12 of 16", "room 15 of 16"])
def test_a_level_that_needs_less_than_estimated_is_found_before_a_refusal(room):
    variants = Variants(Front(5))
    least = variants.real(SMALLEST)
    assert variants.real(room).bytes < 1.08 * least.bytes
    smaller = Needs(int(0.95 * least.bytes), least.products)
    variants.real = lambda level: smaller if level == room else Variants.real(variants, level)
    assert fitting_level(variants, int(0.97 * least.bytes)) == room


def test_a_refusal_far_from_a_budget_compiles_the_smallest_level_alone():
    variants = Variants(Front(0))
    assert fitting_level(variants, BESIDES // 2) is None
    assert set(variants.known) == {PLAIN, DEFAULT, SMALLEST}


def test_what_plain_jax_keeps_is_not_searched():
    variants = Variants(Front(0))
    assert fitting_level(variants, variants.real(PLAIN).bytes) == PLAIN and set(variants.known) == {PLAIN}
