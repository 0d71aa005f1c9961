"""Stashes in a peer's memory: the table is played with tokens, and the pipeline gives the same gradients."""

import jax
import optax
import pytest

import jaxpipe
from jaxpipe import Network
from jaxpipe.schedules import gpipe, one_f_one_b
from jaxpipe.schedules.swaps import balance, peer
from jaxpipe.schedules.table import Kind
from tests.compare import assert_same_bits


KEY = jax.random.key(0)


def play(schedule, swaps):
    """Walk through the ticks with tokens for each stash, whose sizes differ from stage to stage."""
    p = schedule.num_stages
    memory = [[None] * 1000 for _ in range(p)]
    sizes = [3 + 2 * s for s in range(p)]

    def place(device, stage, slot):
        start = swaps.address(device, stage, slot, sizes)
        assert start >= 0 and start + max(sizes) <= swaps.arena(sizes)
        return slice(start, start + sizes[stage])

    for t in range(len(schedule.ticks)):
        for s in range(p):
            j = schedule.row(s, Kind.FORWARD)[t]
            if j >= 0:
                here = place(s, s, swaps.written[s][j])
                assert not any(memory[s][here]), f"tick {t}: stage {s} writes over a stash"
                memory[s][here] = [(s, j)] * sizes[s]
        for s in range(p):
            j = schedule.row(s, Kind.BACKWARD)[t]
            if j >= 0:
                here = place(s, s, swaps.read[s][j])
                assert memory[s][here] == [(s, j)] * sizes[s], f"tick {t}: stage {s} finds {memory[s][here]} for {j}"
                memory[s][here] = [None] * sizes[s]
        moves = [m for m in swaps.moves if m.tick == t]
        assert len({m.source for m in moves}) == len({m.target for m in moves}) == len(moves)
        carried = []
        for m in moves:
            assert m.target == peer(m.source, p)
            here = place(m.source, m.stage, m.source_slot)
            assert memory[m.source][here] == [(m.stage, m.microbatch)] * sizes[m.stage]
            carried.append(memory[m.source][here])
            memory[m.source][here] = [None] * sizes[m.stage]
        for m, tokens in zip(moves, carried, strict=True):
            here = place(m.target, m.stage, m.target_slot)
            assert not any(memory[m.target][here])
            memory[m.target][here] = tokens
    assert not any(token for device in memory for token in device)


@pytest.mark.parametrize("p", range(2, 9))
@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 16, 33])
def test_every_backward_pass_finds_its_stash(p, m):
    schedule = one_f_one_b(p, m)
    swaps = balance(schedule)
    if swaps is None:
        return
    assert swaps.slots < max(schedule.in_flight(s) for s in range(p))
    play(schedule, swaps)


@pytest.mark.parametrize("p", range(2, 9))
def test_the_ideal_number_of_slots(p):
    """In the steady state ``p`` stages hold ``p * p`` stashes: ``p`` each, where ``2 p - 1`` are held without."""
    schedule = one_f_one_b(p, 4 * p)
    assert schedule.in_flight(0) == 2 * p - 1
    assert sum(schedule.in_flight(s) for s in range(p)) == p * p
    assert balance(schedule).slots == p


def test_where_all_hold_as_much_nothing_moves():
    assert balance(gpipe(4, 8)) is None
    assert balance(one_f_one_b(1, 8)) is None


def test_one_stash_in_a_literal_table():
    """Two stages: the first holds three micro-batches, or two if one is with the second for a tick."""
    swaps = balance(one_f_one_b(2, 4))
    assert swaps.slots == 2
    assert [(m.tick, m.microbatch, m.source, m.target) for m in swaps.moves] == [
        (0, 0, 0, 1),
        (1, 1, 0, 1),
        (1, 0, 1, 0),
        (2, 2, 0, 1),
        (2, 1, 1, 0),
        (3, 3, 0, 1),
        (3, 2, 1, 0),
        (4, 3, 1, 0),
    ]


def layers(weights, x):
    x = x * 2  # so that the first stage stores as much as the others
    for w in weights:
        x = x @ w
    return x


def chain(network=None, memory=None):
    """Sixteen equal layers in four stages: the first holds seven stashes, the last one."""
    m, rows, width = 8, 256, 64
    x = jax.random.normal(KEY, (m * rows, width))
    model = jax.tree_util.Partial(layers, list(jax.random.normal(KEY, (16, width, width)) / 8))
    mesh = jax.make_mesh((4,), ("stage",), devices=jax.devices()[:4])
    options = {"optimizer": optax.sgd(0.1), "num_microbatches": m, "profile": "analytic", "storage": ()}
    pipeline = jaxpipe.partition(
        model, mesh, x, loss=lambda f, x: f(x).sum(), network=network, memory=memory, **options
    )
    return pipeline, x


def test_less_is_reserved_and_gradients_stay():
    """With fast links stashes go to peers, with slow ones they are computed again; either way the budget holds."""
    usual, x = chain()
    before = usual.plan.memory
    state = usual.init(KEY)
    expected = usual.value_and_grad(state, x)
    budget = usual.plan.predicted_bytes - int(0.35 * before["arena"])
    swapped, _ = chain(Network.uniform(4, 1e15), budget)
    after = swapped.plan.memory
    landing = after["transport"] - before["transport"]
    assert landing > 0
    assert after["arena"] + landing <= 0.65 * before["arena"]
    assert [stage.away for stage in swapped.plan.stages] == [3, 1, 0, 0]
    assert {stage.storage for stage in swapped.plan.stages} == {"default"}
    assert "7, 3 away" in str(swapped.plan)
    assert_same_bits(swapped.value_and_grad(state, x), expected)
    fallen = usual.memory_report().compiled_bytes[0] - swapped.memory_report().compiled_bytes[0]
    # Within a page for each slot and what lands; XLA finds room for that in other buffers.
    assert fallen >= before["arena"] - after["arena"] - landing
    again, _ = chain(Network.uniform(4, 1e3), budget)
    assert [stage.away for stage in again.plan.stages] == [0, 0, 0, 0]
    assert any(stage.added_seconds > 0 for stage in again.plan.stages)
    assert again.plan.predicted_bytes <= budget
