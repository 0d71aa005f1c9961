"""Stashes in a peer's memory or the host's: the table is played with tokens; pipelines give the same gradients."""

import itertools
import math
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxpipe
from jaxpipe import Network
from jaxpipe.schedules import gpipe, one_f_one_b
from jaxpipe.schedules.peers import Links, balance
from jaxpipe.schedules.swaps import HOST, Slice, slice_pages, swap_table
from jaxpipe.schedules.table import Kind
from jaxpipe.schedules.transport import transport
from jaxpipe.units import bytes_text
from tests.compare import assert_same_bits


KEY = jax.random.key(0)


def play(schedule, swaps, sizes):
    """Walk through the ticks with a token for each page of each stash; messages are as large as their round's."""
    p = schedule.num_stages
    found = transport(swaps, sizes)
    memory = [[None] * found.arena for _ in range(p)]
    hosts = [[None] * found.host for _ in range(p)]

    def place(s, slot):
        start = found.home[s] + slot * sizes[s]
        assert start >= 0 and start + max(sizes) <= found.arena
        return slice(start, start + sizes[s])

    def stash(s, j):
        return [(s, j, n) for n in range(sizes[s])]

    for t in range(len(schedule.ticks)):
        for s in range(p):
            j = schedule.row(s, Kind.FORWARD)[t]
            if j >= 0:
                here = place(s, swaps.written[s][j])
                assert not any(memory[s][here]), f"tick {t}: stage {s} writes over a stash"
                memory[s][here] = stash(s, j)
        for s in range(p):
            j = schedule.row(s, Kind.BACKWARD)[t]
            if j >= 0:
                here = place(s, swaps.read[s][j])
                assert memory[s][here] == stash(s, j), f"tick {t}: stage {s} finds {memory[s][here]} for {j}"
                memory[s][here] = [None] * sizes[s]
        rows = [row for row in found.rows if row.tick == t]
        for k, one in enumerate(found.rounds):
            mine = [row for row in rows if row.round == k]
            for ends in ([row.source for row in mine], [row.target for row in mine]):
                devices = [end for end in ends if end != HOST]
                assert len(set(devices)) == len(devices)
            for row in mine:
                assert 0 < row.pages <= one.pages
                assert (row.source, row.target) in one.pairs if one.pairs else HOST in (row.source, row.target)
                for end, page in ((row.source, row.source_page), (row.target, row.target_page)):
                    # The last slot of the host is for what nobody wants.
                    assert page + one.pages <= (found.host - one.pages if end == HOST else found.arena)
        carried = []
        # The host is written first, then read.
        for row in [row for row in rows if row.target == HOST]:
            here = slice(row.source_page, row.source_page + row.pages)
            there = slice(row.target_page, row.target_page + row.pages)
            whole = slice(row.target_page, row.target_page + found.rounds[row.round].pages)
            assert not any(hosts[row.source][whole]), f"tick {t}: {row} is written over a stash in the host's memory"
            hosts[row.source][there], memory[row.source][here] = memory[row.source][here], [None] * row.pages
            assert all(hosts[row.source][there])
        rows = [row for row in rows if row.target != HOST]
        for row in rows:
            here = slice(row.source_page, row.source_page + row.pages)
            held = hosts[row.target] if row.source == HOST else memory[row.source]
            carried.append(held[here])
            assert all(carried[-1])
            held[here] = [None] * row.pages
        for row, tokens in zip(rows, carried, strict=True):
            here = slice(row.target_page, row.target_page + row.pages)
            assert not any(memory[row.target][here]), f"tick {t}: {row} lands on a stash"
            memory[row.target][here] = tokens
    assert not any(token for device in (*memory, *hosts) for token in device)


@pytest.mark.parametrize("p", range(2, 9))
@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 16, 33])
def test_every_backward_pass_finds_its_stash(p, m):
    schedule = one_f_one_b(p, m)
    sizes = [3 + 2 * (p - s) for s in range(p)]
    swaps = balance(schedule, sizes)
    if swaps is None:
        return
    before = max((schedule.in_flight(s) - 1) * sizes[s] for s in range(p)) + max(sizes)
    assert transport(swaps, sizes).arena < before
    play(schedule, swaps, sizes)


@st.composite
def networks(draw):
    """A schedule with stashes of any size and links of any speed, some of them missing."""
    p, m = draw(st.integers(2, 6)), draw(st.integers(1, 12))
    sizes = draw(st.lists(st.integers(0, 12), min_size=p, max_size=p))
    rate = st.sampled_from([0.0, 1.0, 2.0, 3.0, 10.0])
    rates = {pair: draw(rate) for pair in itertools.combinations(range(p), 2)}
    bandwidth = tuple(tuple(rates[min(a, b), max(a, b)] if a != b else math.inf for b in range(p)) for a in range(p))
    latency = ((draw(st.sampled_from([0.0, 0.5])),) * p,) * p
    host = draw(st.sampled_from([0, 1, 40, 1000])), tuple(draw(rate) for _ in range(p)), latency[0]
    return one_f_one_b(p, m), sizes, Links(bandwidth, latency, *host), draw(st.none() | st.integers(1, 60))


@settings(max_examples=100, deadline=None)
@given(networks())
def test_any_sizes_and_links(case):
    schedule, sizes, links, room = case
    swaps = balance(schedule, sizes, links, room)
    if swaps is None:
        return
    for s, slices in enumerate(swaps.slices):
        for one in slices:
            rates = links.host_bandwidth if one.target == HOST else links.bandwidth[s]
            assert one.target != s and rates[one.target if one.target != HOST else s] == one.bandwidth > 0
    assert transport(swaps, sizes).host <= links.host_pages
    play(schedule, swaps, sizes)
    # What was chosen for some sizes is right for all others.
    play(schedule, swaps, sizes[::-1])


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


def test_slices_are_in_proportion_to_bandwidth():
    """Two links of bandwidth 2 : 1, by the largest remainder; nothing is lost for any number of pages."""
    two = [Slice(2, 2.0), Slice(3, 1.0)]
    assert [slice_pages(n, two) for n in (0, 1, 2, 3, 4, 5, 300)] == [
        (0, 0),
        (1, 0),
        (1, 1),
        (2, 1),
        (3, 1),
        (3, 2),
        (200, 100),
    ]
    assert slice_pages(7, [Slice(1, 1.0), Slice(2, 1.0), Slice(3, 1.0)]) == (3, 2, 2)


def links(p, rates, other=0.0):
    """Links between stages: some given, all others of one rate."""
    table = [[other] * p for _ in range(p)]
    for (a, b), rate in rates.items():
        table[a][b] = table[b][a] = rate
    return Links(tuple(map(tuple, table)), ((0.0,) * p,) * p)


def test_a_stash_goes_over_two_links_at_once():
    """Only the first stage stores much: 7 stashes of 300 pages, and two peers with links of 2 : 1."""
    schedule, sizes = one_f_one_b(4, 16), [300, 1, 1, 1]
    swaps = balance(schedule, sizes, links(4, {(0, 2): 20.0, (0, 3): 10.0}))
    found = transport(swaps, sizes)
    assert [one.target for one in swaps.slices[0]] == [2, 3] and not any(swaps.slices[1:])
    assert found.pages[0] == (200, 100)
    # A third of a stash is as long on its way over the slow link as two thirds over the fast one.
    assert found.seconds == 10.0
    # With stashes away for 4 ticks the first device holds 3, the second peer 4 * 200 pages: a level of 900.
    assert swaps.ticks[0] == 4 and swaps.own[0] == 3
    assert found.arena == 900
    assert [(row.target, row.pages) for row in found.rows if row.tick == 0] == [(2, 200), (3, 100)]
    assert all(row.tick < 5 for row in found.rows if row.tick < 5 and row.source == 0)
    play(schedule, swaps, sizes)


def test_a_slow_mirrored_link_is_not_used():
    """All links alike but that to the mirrored stage: what went there goes to others, and as much is saved."""
    schedule, sizes = one_f_one_b(4, 16), [300, 10, 10, 10]
    even = dict.fromkeys(itertools.combinations(range(4), 2), 10.0)
    slow = balance(schedule, sizes, links(4, even | {(0, 3): 0.01}))
    assert slow.slices[0] and 3 not in [one.target for one in slow.slices[0]]
    usual = balance(schedule, sizes, links(4, even))
    assert 3 in [one.target for one in usual.slices[0]]
    play(schedule, slow, sizes)


def test_a_peer_takes_no_more_than_it_has_free():
    """The first stage can keep two stashes below 600 pages, and has five away; the last stage's own needs 400."""
    schedule = one_f_one_b(4, 16)
    even = links(4, {(0, 2): 10.0, (0, 3): 10.0})
    full = balance(schedule, [100, 1, 1, 400], even)
    assert [one.target for one in full.slices[0]] == [2] and transport(full, [100, 1, 1, 400]).arena == 503
    free = balance(schedule, [100, 1, 1, 10], even)
    assert [one.target for one in free.slices[0]] == [2, 3]


def test_of_swaps_that_fit_the_fastest_are_taken():
    """With room to spare a stash goes to all peers at once; with less only to those that have it."""
    schedule, sizes = one_f_one_b(4, 16), [60, 60, 60, 60]
    assert transport(balance(schedule, sizes), sizes).arena == 4 * 60
    roomy = balance(schedule, sizes, room=6 * 60)
    assert transport(roomy, sizes).arena <= 6 * 60
    assert transport(roomy, sizes).seconds < transport(balance(schedule, sizes), sizes).seconds == 60
    # Below the lowest level there is nothing else than the lowest.
    assert transport(balance(schedule, sizes, room=60), sizes).arena == 4 * 60


def best_level(schedule, sizes, bandwidth, host=()):
    """By brute force: the lowest level over all ways to choose ticks, and peers whose own stashes stay, or the host."""
    p = schedule.num_stages
    rates = [{t: bandwidth[s][t] for t in range(p) if t != s and bandwidth[s][t]} for s in range(p)]
    for s, rate in enumerate(host):
        rates[s][HOST] = rate
    starts = [schedule.when(s, Kind.FORWARD) for s in range(p)]
    ends = [schedule.when(s, Kind.BACKWARD) for s in range(p)]
    ways = []
    for s in range(p):
        chosen = [c for n in range(1, len(rates[s]) + 1) for c in itertools.combinations(rates[s], n)]
        longest = max(ends[s][j] - starts[s][j] for j in starts[s])
        ways.append([(0, ())] + [(away, c) for away in range(1, longest) for c in chosen])

    def held(s, away):
        """The most stashes at home and the most away, each over all ticks."""
        home, gone = [], []
        for t in range(len(schedule.ticks)):
            here = [j for j in starts[s] if starts[s][j] <= t <= ends[s][j]]
            out = [j for j in here if 0 < away < ends[s][j] - starts[s][j] and 1 <= t - starts[s][j] <= away]
            home.append(len(here) - len(out))
            gone.append(len(out))
        return max(home), max(gone)

    known = [{away: held(s, away) for away in range(len(schedule.ticks))} for s in range(p)]
    best = math.inf
    for choice in itertools.product(*ways):
        level = [known[s][away][0] * sizes[s] for s, (away, _) in enumerate(choice)]
        # The last of its own stashes is read through a window as large as the largest of all.
        window = max(level[s] + max(sizes) - sizes[s] for s in range(p))
        for s, (away, peers) in enumerate(choice):
            total = sum(rates[s][t] for t in peers)
            for t in peers:
                share = sizes[s] * rates[s][t] / total
                assert share == int(share)
                level[t] += 0 if t == HOST else known[s][away][1] * share
        if not any(choice[t][0] for _, peers in choice for t in peers if t != HOST):
            best = min(best, max([window, *level]))
    return best


@pytest.mark.parametrize("seed", range(8))
def test_the_lowest_level_is_that_of_brute_force(seed):
    """Three stages, or four of which not all are joined; sizes that all sums of bandwidths divide."""
    rng = np.random.default_rng(seed)
    p = 3 if seed % 2 else 4
    schedule = one_f_one_b(p, 8)
    sizes = [int(n) for n in 60 * rng.integers(1, 5, p)]
    pairs = list(itertools.combinations(range(p), 2))[: 4 if p == 4 else 3]
    found = links(p, {pair: float(rng.choice([1, 2])) for pair in pairs})
    expected = best_level(schedule, sizes, found.bandwidth)
    swaps = balance(schedule, sizes, found)
    if swaps is None:
        assert expected == max((schedule.in_flight(s) - 1) * sizes[s] for s in range(p)) + max(sizes)
        return
    arena = transport(swaps, sizes).arena
    # Messages of a round are as large as its largest; the window for a smaller one may stick out of an arena.
    assert expected <= arena <= expected + max(one.pages for one in transport(swaps, sizes).rounds)
    assert len(transport(swaps, sizes).rounds) > 1 or arena == expected


def with_host(found, rate, pages=10**6):
    """The same links with one of some rate from every device to its host's memory."""
    p = len(found.bandwidth)
    return replace(found, host_pages=pages, host_bandwidth=(rate,) * p, host_latency=(0.0,) * p)


@pytest.mark.parametrize("seed", range(4))
def test_the_lowest_level_with_the_host_is_that_of_brute_force(seed):
    """Three stages, whose sums of rates divide all sizes; the host has room for everything."""
    rng = np.random.default_rng(seed)
    schedule, sizes = one_f_one_b(3, 8), [int(n) for n in 60 * rng.integers(1, 5, 3)]
    pairs = {pair: float(rng.choice([1, 2])) for pair in itertools.combinations(range(3), 2)}
    found = with_host(links(3, pairs), float(rng.choice([1, 2])))
    expected = best_level(schedule, sizes, found.bandwidth, found.host_bandwidth)
    assert expected < best_level(schedule, sizes, found.bandwidth)
    moved = transport(balance(schedule, sizes, found), sizes)
    assert expected <= moved.arena <= expected + max(one.pages for one in moved.rounds)


@pytest.mark.parametrize("p", range(2, 9))
def test_with_room_in_the_host_two_stashes_are_on_each_device(p):
    """That of this tick's forward pass, and one that came back before: whatever ``p``, where ``p`` is peers' best."""
    schedule, sizes = one_f_one_b(p, 4 * p), [12] * p
    swaps = balance(schedule, sizes, with_host(links(p, {}), 1.0))
    assert swaps.slots == 2 and transport(swaps, sizes).arena == 24
    assert swaps.own == (2,) * (p - 1) + (1,)
    # A stash of stage s is there for 2 (p - 1 - s) ticks between its two, less the last.
    assert swaps.ticks == tuple(2 * (p - 1 - s) - 1 if s < p - 1 else 0 for s in range(p))
    # Those of the first stage are away together, one leaves before another is taken back, and a slot is to spare.
    assert transport(swaps, sizes).host == 12 * (2 * (p - 1) - 1 + 1 + 1)
    play(schedule, swaps, sizes)


def test_the_host_helps_where_all_hold_as_much():
    """GPipe's last stage begins with the last micro-batch; the first comes back while the others are taken."""
    schedule, sizes = gpipe(4, 8), [10] * 4
    assert balance(schedule, sizes) is None
    swaps = balance(schedule, sizes, with_host(Links.equal(4), 1.0))
    assert transport(swaps, sizes).arena < 8 * 10
    play(schedule, swaps, sizes)


def test_one_stash_with_the_host_in_a_literal_table():
    """Two stages: as with a peer, but in other slots, for one leaves before another is taken out of the same place."""
    schedule = one_f_one_b(2, 4)
    swaps = swap_table(schedule, (1, 0), ([Slice(HOST)], []))
    assert swaps.own == (2, 1) and swaps.guests == (1, 0) and swaps.hosted == (2, 0) and swaps.slots == 2
    assert [(m.tick, m.microbatch, m.source, m.target, m.source_slot, m.target_slot) for m in swaps.moves] == [
        (0, 0, 0, HOST, 0, 0),
        (1, 0, HOST, 0, 0, 0),
        (1, 1, 0, HOST, 0, 1),
        (2, 1, HOST, 0, 1, 0),
        (2, 2, 0, HOST, 1, 0),
        (3, 2, HOST, 0, 0, 0),
        (3, 3, 0, HOST, 1, 1),
        (4, 3, HOST, 0, 1, 0),
    ]
    found = transport(swaps, (3, 5))
    assert found.pages == ((3,), ()) and found.rounds[0].pairs == () and found.host == 3 * 3
    assert [(row.source_page, row.target_page) for row in found.rows[:3]] == [(0, 0), (0, 0), (0, 3)]
    play(schedule, swaps, (3, 5))


def test_slices_over_a_peer_and_the_host_are_in_proportion_to_bandwidth():
    """A link to a peer that is twice as fast as that to the host; sent at once, as the host has room for a third."""
    schedule, sizes = one_f_one_b(4, 16), [300, 1, 1, 1]
    # With stashes away for 4 ticks and up to 5 with the host: one slot to spare, and one page less than there is room.
    found = with_host(links(4, {(0, 3): 20.0}), 10.0, pages=6 * 101)
    swaps = balance(schedule, sizes, found, room=900)
    moved = transport(swaps, sizes)
    assert [one.target for one in swaps.slices[0]] == [3, HOST] and swaps.ticks[0] == 4
    assert moved.pages[0] == (200, 100) and moved.seconds == 10.0
    assert moved.arena == 900 and moved.host == 6 * 100
    play(schedule, swaps, sizes)
    # A page less in the host's memory, and one stash less can be there.
    fewer = balance(schedule, sizes, replace(found, host_pages=6 * 101 - 1), room=900)
    assert fewer.ticks[0] == 3 and transport(fewer, sizes).host == 5 * 100


def test_the_host_is_not_used_where_peers_are_as_good():
    """With a link a hundred times slower all goes to peers, as long as these have room."""
    schedule, sizes = one_f_one_b(4, 16), [100] * 4
    usual = balance(schedule, sizes, Links.equal(4), room=400)
    assert balance(schedule, sizes, with_host(Links.equal(4), 0.01), room=400) == usual
    least = balance(schedule, sizes, with_host(Links.equal(4), 0.01))
    assert least.slots == 2 and transport(least, sizes).seconds == 100 / 0.01


def layers(weights, x):
    x = x * 2  # so that the first stage stores as much as the others
    for w in weights:
        x = x @ w
    return x


def chain(network=None, memory=None, replicas=1):
    """Sixteen equal layers in four stages: the first holds seven stashes, the last one."""
    m, rows, width = 8, 256, 64
    x = jax.random.normal(KEY, (replicas * m * rows, width))
    model = jax.tree_util.Partial(layers, list(jax.random.normal(KEY, (16, width, width)) / 8))
    shape, names = ((4,), ("stage",)) if replicas == 1 else ((replicas, 4), ("data", "stage"))
    mesh = jax.make_mesh(shape, names, devices=jax.devices()[: 4 * replicas])
    options = {
        "optimizer": optax.sgd(0.1),
        "num_microbatches": m,
        "profile": "analytic",
        "storage": (),
        "runtime": "spmd",
    }
    pipeline = jaxpipe.partition(
        model, mesh, x, loss=lambda f, x: f(x).sum(), network=network, memory=memory, compile=False, **options
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
    text = swapped.plan.to_json()
    assert jaxpipe.Plan.from_json(text) == swapped.plan and '"away_ticks": 3' in text
    fallen = usual.memory_report().compiled_bytes[0] - swapped.memory_report().compiled_bytes[0]
    # Within a page for each slot and what lands; XLA finds room for that in other buffers.
    assert fallen >= before["arena"] - after["arena"] - landing
    again, _ = chain(Network.uniform(4, 1e3), budget)
    assert [stage.away for stage in again.plan.stages] == [0, 0, 0, 0]
    assert any(stage.added_seconds > 0 for stage in again.plan.stages)
    assert not any(stage.recomputed for stage in (*usual.plan.stages, *swapped.plan.stages))
    assert {name for stage in again.plan.stages for name in stage.recomputed} == {"dot_general"}
    assert again.plan.predicted_bytes <= budget


def test_a_stash_is_split_over_two_peers():
    """Room for five of seven stashes, and links of 2 : 1 from the first stage to the two that have some free."""
    usual, x = chain()
    before, state = usual.plan.memory, usual.init(KEY)
    (stash,) = {stage.stash_bytes for stage in usual.plan.stages}
    bandwidth = np.full((4, 4), 1e15)
    bandwidth[0, 3] = bandwidth[3, 0] = 2e15
    budget = usual.plan.predicted_bytes - before["arena"] + int(5.4 * stash)
    swapped, _ = chain(Network(bandwidth), budget)
    plan = swapped.plan
    assert plan.predicted_bytes <= budget and {stage.storage for stage in plan.stages} == {"default"}
    first, *others = plan.stages
    assert first.away == 2 and not any(stage.away for stage in others)
    assert [(piece.stage, piece.devices) for piece in first.pieces] == [(2, (2,)), (3, (3,))]
    pages = stash // 4096
    assert [piece.bytes // 4096 for piece in first.pieces] == [round(pages / 3), round(2 * pages / 3)]
    assert f"of stage 0 2 stashes, each for 2 ticks: {bytes_text(first.pieces[0].bytes)} with stage 2" in str(plan)
    assert jaxpipe.Plan.from_json(plan.to_json()) == plan
    assert_same_bits(swapped.value_and_grad(state, x), usual.value_and_grad(state, x))
    assert max(swapped.memory_report().compiled_bytes) <= budget


@pytest.mark.slow
def test_replicas_swap_among_themselves():
    usual, x = chain(replicas=2)
    budget = usual.plan.predicted_bytes - int(0.35 * usual.plan.memory["arena"])
    swapped, _ = chain(Network.uniform(8, 1e15), budget, replicas=2)
    first = swapped.plan.stages[0]
    assert first.away == 3 and [len(piece.devices) for piece in first.pieces] == [2]
    # Each with its own state: with a network and a budget, stages may be on other devices.
    assert_same_bits(swapped.value_and_grad(swapped.init(KEY), x), usual.value_and_grad(usual.init(KEY), x))


def forced(pipeline, swaps):
    """The same pipeline with some swaps, whatever devices can do; on a CPU, the host's memory is one more buffer."""
    planned = pipeline._planned
    pipeline._runtime.planned = replace(planned, program=replace(planned.program, swaps=swaps))
    return pipeline


def small(p, m):
    """Two layers in each stage, and ten pages or more of each stash: several portions."""
    x = jax.random.normal(KEY, (m * 64, 80))
    model = jax.tree_util.Partial(layers, list(jax.random.normal(KEY, (2 * p, 80, 80)) / 9))
    mesh = jax.make_mesh((p,), ("stage",), devices=jax.devices()[:p])
    options = {"optimizer": optax.sgd(0.1), "num_microbatches": m, "profile": "analytic", "storage": ()}
    options["runtime"] = "spmd"
    return jaxpipe.partition(model, mesh, x, loss=lambda f, x: (f(x) ** 2).sum(), schedule="one_f_one_b", **options), x


@pytest.mark.core
def test_gradients_stay_with_stashes_in_the_host_s_memory():
    """Two stages; the executor runs the same program as on devices that have such memory."""
    usual, x = small(2, 4)
    state = usual.init(KEY)
    expected = usual.value_and_grad(state, x)
    swaps = swap_table(usual.schedule, (1, 0), ([Slice(HOST)], []))
    hosted = forced(small(2, 4)[0], swaps)
    assert_same_bits(hosted.value_and_grad(state, x), expected)
    # Every stash was gone for a tick: with ten pages in place of three times as many, and a window of fifteen.
    program = hosted._planned.program
    assert len(program.transport.rows) == 2 * 4 and program.transport.pages[0] == (10,)
    assert program.stash_pages == (10, 15) and program.arena_pages == 10 + 15 and program.host_pages == 3 * 10


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_gradients_stay_with_slices_with_peers_and_the_host(replicas):
    """Four stages, several pages in each portion; the first two send to a peer and the host, the third to the host."""
    usual, x = chain(replicas=replicas)
    state = usual.init(KEY)
    expected = usual.value_and_grad(state, x)
    slices = ([Slice(3, 1.0), Slice(HOST, 2.0)], [Slice(HOST, 1.0), Slice(2, 3.0)], [Slice(HOST)], [])
    swaps = swap_table(usual.schedule, (5, 3, 1, 0), slices)
    hosted = forced(chain(replicas=replicas)[0], swaps)
    assert_same_bits(hosted.value_and_grad(state, x), expected)
    after, _ = hosted.step(state, x)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(hosted.parameters(after)))
