"""Places for buffers, as XLA finds them."""

import random

from jaxpipe.graph.buffer_packing import Buffer, alive_bytes, in_memory, reserved_bytes


def test_known_places():
    assert reserved_bytes([]) == alive_bytes([]) == 0
    chain = [Buffer(0, 1, 8), Buffer(1, 2, 8), Buffer(2, 3, 8)]
    assert alive_bytes(chain) == reserved_bytes(chain) == 16
    # The results of a conditional are written by its other branch, too, before.
    assert reserved_bytes([Buffer(4, 5, 8, before=1), Buffer(1, 2, 8)]) == 16
    assert reserved_bytes([Buffer(4, 5, 8, before=1), Buffer(2, 3, 8)]) == 8

    assert reserved_bytes([Buffer(0, 1, 8), Buffer(0, 9, 6), Buffer(2, 9, 9)]) == 15


def test_what_is_needed_for_the_shortest_time_is_kept_beside_the_memory():
    short, long, later, large = Buffer(0, 1, 8), Buffer(0, 5, 8), Buffer(3, 3, 8), Buffer(2, 2, 20)
    buffers = [long, large, short, later]
    assert in_memory(buffers, 0) == buffers
    assert in_memory(buffers, 8) == [large, long]
    assert in_memory(buffers, 16) == [large]
    assert in_memory(buffers, 28) == []


def test_no_less_than_is_alive():
    for seed in range(50):
        r = random.Random(seed)
        starts = [r.randrange(30) for _ in range(20)]
        buffers = [Buffer(start, start + r.randrange(10), r.randrange(1, 100)) for start in starts]
        alive = max(sum(b.bytes for b in buffers if b.start <= t <= b.end) for t in range(40))
        assert alive == alive_bytes(buffers) <= reserved_bytes(buffers) <= sum(b.bytes for b in buffers)
