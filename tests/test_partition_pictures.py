"""Pictures of partitions, against literal tables."""

import sys
from types import SimpleNamespace

import pytest
from matplotlib.colors import to_hex

from jaxpipe import Network, Node
from jaxpipe.visualize.pictures import VERMILION, draw_stages


NODES = Network.from_nodes([Node(2, 50e9, name="a"), Node(2, 12e9, speed=0.5)], 1.25e9)


def make_partition(devices, network=NODES, compute=None, communication=None, bottleneck=None, cost_model="throughput"):
    compute = compute or [1e-3] * len(devices)
    communication = communication or [5e-4] * len(devices)
    stages = tuple(
        SimpleNamespace(
            operators=(s, s + 1),
            devices=tuple(placed),
            compute_seconds=compute[s],
            communication_seconds=communication[s],
            sent_bytes=2048 * (s + 1),
            memory_bytes=1e6,
        )
        for s, placed in enumerate(devices)
    )
    bottleneck = bottleneck or max(*compute, *communication)
    return SimpleNamespace(
        stages=stages,
        bottleneck_seconds=bottleneck,
        lower_bound_seconds=bottleneck / 2,
        cost_model=cost_model,
        network=network,
        profile=None,
    )


def test_stages_have_two_bars_each():
    (axes,) = draw_stages(
        make_partition([[0, 1], [2], [3]], compute=[1e-3, 4e-3, 2e-3], communication=[0, 3e-3, 3e-3])
    ).axes
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers}
    assert heights == {"compute": pytest.approx([1, 4, 2]), "communication": pytest.approx([0, 3, 3])}
    assert axes.get_ylabel() == "ms for one micro-batch"
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        "stage 0\n0-1",
        "stage 1\n2",
        "stage 2\n3",
    ]


def test_stages_have_their_bounds():
    figure = draw_stages(make_partition([[0], [1]], compute=[2e-6, 3e-6], communication=[1e-6, 1e-6]))
    (axes,) = figure.axes
    lines = {line.get_label(): line.get_ydata()[0] for line in axes.lines}
    assert lines == {"bottleneck, 3 us": pytest.approx(3e-3), "lower bound, 1.5 us": pytest.approx(1.5e-3)}
    assert "throughput" in figure.get_suptitle()
    assert len(figure.legends[0].get_texts()) == 5


def test_times_of_a_step_do_not_stand_beside_those_of_a_micro_batch():
    """Eleven micro-batches of 3 us and less: bars of that height, and no line at 30 us."""
    times = {"compute": [2e-6, 3e-6], "communication": [1e-6, 1e-6], "bottleneck": 30e-6}
    partition = make_partition([[0], [1]], **times, cost_model="synchronous")
    figure = draw_stages(partition)
    (axes,) = figure.axes
    assert not list(axes.lines) and axes.get_ylim()[1] < 4e-3
    assert figure.get_suptitle().endswith("; all micro-batches of a step take 30 us, at least 15 us")
    (span,) = [patch for patch in axes.patches if patch.get_label() == "bottleneck stage"]
    assert span.get_x() == 0.5


@pytest.mark.parametrize(("bottleneck", "stage"), [(11.0, 1), (19.0, 0)])
def test_the_bottleneck_is_marked_whether_communication_overlaps_or_not(bottleneck, stage):
    # The larger of both is 11 in stage 1, the sum 19 in stage 0.
    partition = make_partition([[0], [1]], compute=[10.0, 11.0], communication=[9.0, 0.5], bottleneck=bottleneck)
    (axes,) = draw_stages(partition).axes
    (span,) = [patch for patch in axes.patches if patch.get_label() == "bottleneck stage"]
    assert (span.get_x(), span.get_width()) == (stage - 0.5, 1)
    assert to_hex(span.get_facecolor()).upper() == VERMILION


def test_missing_matplotlib_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"draw_stages draws with matplotlib.*pip install matplotlib"):
        draw_stages(make_partition([[0]]))
