"""What the pictures of a partition show, against literal tables."""

import itertools
import sys
from types import SimpleNamespace

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.patches import FancyBboxPatch
from matplotlib.text import Annotation

from jaxpipe import Network, Node
from jaxpipe.errors import PartitionError
from jaxpipe.partition_pictures import IDLE, MOST_LETTERS, draw_cluster, draw_stages
from jaxpipe.pictures import COMPONENT_COLORS, VERMILION


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


def boxes(figure):
    return [patch for patch in figure.axes[0].patches if isinstance(patch, FancyBboxPatch)]


def words(figure):
    """The texts in boxes, two each, and between them."""
    return [text.get_text() for text in figure.axes[0].texts if text.get_text()]


def arrows(figure):
    return [text for text in figure.axes[0].texts if isinstance(text, Annotation)]


def test_cluster_shows_where_the_stages_are():
    figure = draw_cluster(make_partition([[0, 1], [3]]))
    assert words(figure)[:-1] == ["stage 0", "a/0, a/1, 1x", "stage 1", "node 1/1, 0.5x", "idle", "node 1/0, 0.5x"]
    colors = [to_hex(box.get_facecolor()).upper() for box in boxes(figure)]
    assert colors == [COMPONENT_COLORS[0], COMPONENT_COLORS[1], IDLE]
    assert figure.get_suptitle().startswith("2 stages on 3 of 4 devices\n")


def test_a_box_names_as_many_devices_as_fit():
    network = Network.from_nodes([Node(40, 1e10, name="a machine"), Node(1, 1e10, name="x" * 50)], 1e9)
    figure = draw_cluster(make_partition([range(40), [40]], network))
    assert words(figure)[1] == "a machine/0, a machine/1 + 38" and words(figure)[3] == "x" * MOST_LETTERS


def test_cluster_shows_what_is_sent():
    figure = draw_cluster(make_partition([[0], [1], [2], [3]]))
    assert len(arrows(figure)) == 3
    assert words(figure)[-3:] == ["2.00 KiB\n50 GB/s", "4.00 KiB\n1.25 GB/s", "6.00 KiB\n12 GB/s"]


def test_the_slowest_link_between_two_stages_counts():
    assert words(draw_cluster(make_partition([[0], [1, 2]])))[-1] == "2.00 KiB\n1.25 GB/s"


def test_a_missing_link_is_shown():
    chain = Network([[0, 1e9, 0], [1e9, 0, 1e9], [0, 1e9, 0]])
    assert words(draw_cluster(make_partition([[0], [2]], chain)))[-1].endswith("no link")


def test_cluster_marks_the_bottleneck():
    figure = draw_cluster(make_partition([[0], [1], [2, 3]], compute=[1e-3, 2e-3, 4e-3]))
    assert [to_hex(box.get_edgecolor()) for box in boxes(figure)] == ["#ffffff", "#ffffff", "#000000"]
    assert "bottleneck 4 ms in stage 2, lower bound 2 ms" in figure.get_suptitle()


@pytest.mark.parametrize("count", [1, 2, 4, 5, 16, 43])
def test_nothing_is_drawn_on_top_of_another(count):
    network = Network.from_nodes([Node(count + 1, 15.75e9, speed=0.25), Node(1, 1e10)], 1.25e9)
    partition = make_partition([[k] for k in range(count)], network)
    for stage in partition.stages:
        stage.sent_bytes = 1000 * 2**20  # as wide as it gets
    figure = draw_cluster(partition)
    (axes,) = figure.axes
    renderer = FigureCanvasAgg(figure).get_renderer()
    drawn = [box.get_window_extent(renderer) for box in boxes(figure)]
    texts = [text.get_window_extent(renderer) for text in axes.texts if text.get_text()]
    links = texts[2 * len(drawn) :]
    assert len(drawn) == count + 1 and len(links) == len(arrows(figure)) == count - 1
    for things in (drawn, texts, [*drawn, *links]):
        assert not [pair for pair in itertools.combinations(things, 2) if pair[0].overlaps(pair[1])]
    for box, words in zip(drawn, zip(texts[::2], texts[1::2], strict=False), strict=False):
        assert all(box.x0 < text.x0 and text.x1 < box.x1 for text in words)
    # An inch is an inch, and everything is inside.
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    assert (right - left, high - low) == pytest.approx(tuple(figure.get_size_inches()))
    assert all(figure.bbox.contains(*corner) for thing in (*drawn, *texts) for corner in (thing.p0, thing.p1))


def test_another_network_in_place_of_the_partitions_own():
    figure = draw_cluster(make_partition([[0], [1]]), Network.uniform(2, 7e9))
    assert words(figure)[-1] == "2.00 KiB\n7 GB/s"
    with pytest.raises(PartitionError, match=r"stage 1 on device 3; the network has devices 0\.\.1"):
        draw_cluster(make_partition([[0], [3]]), Network.uniform(2, 7e9))


def test_stages_have_two_bars_each():
    (axes,) = draw_stages(
        make_partition([[0, 1], [2], [3]], compute=[1e-3, 4e-3, 2e-3], communication=[0, 3e-3, 3e-3])
    ).axes
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers}
    assert heights == {"compute": pytest.approx([1, 4, 2]), "communication": pytest.approx([0, 3, 3])}
    assert axes.get_ylabel() == "ms for one micro-batch"
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        "stage 0\ndevices 0, 1",
        "stage 1\ndevice 2",
        "stage 2\ndevice 3",
    ]


def test_stages_have_their_bounds():
    figure = draw_stages(make_partition([[0], [1]], compute=[2e-6, 3e-6], communication=[1e-6, 1e-6]))
    (axes,) = figure.axes
    lines = {line.get_label(): line.get_ydata()[0] for line in axes.lines}
    assert lines == {"bottleneck, 3 µs": pytest.approx(3), "lower bound, 1.5 µs": pytest.approx(1.5)}
    assert axes.get_ylabel() == "µs for one micro-batch"
    assert "throughput" in figure.get_suptitle()
    assert len(figure.legends[0].get_texts()) == 5


def test_times_of_a_step_do_not_stand_beside_those_of_a_micro_batch():
    """Eleven micro-batches of 3 us and less: bars of that height, and no line at 30 us."""
    times = {"compute": [2e-6, 3e-6], "communication": [1e-6, 1e-6], "bottleneck": 30e-6}
    found = make_partition([[0], [1]], **times, cost_model="synchronous")
    figure = draw_stages(found)
    (axes,) = figure.axes
    assert not list(axes.lines) and axes.get_ylim()[1] < 4
    assert figure.get_suptitle().endswith("; all micro-batches of a step take 30 µs, at least 15 µs")
    (span,) = [patch for patch in axes.patches if patch.get_label() == "bottleneck stage"]
    assert span.get_x() == 0.5
    assert "step 30 µs, longest in stage 1, lower bound 15 µs" in draw_cluster(found).get_suptitle()


@pytest.mark.parametrize(("bottleneck", "stage"), [(11.0, 1), (19.0, 0)])
def test_the_bottleneck_is_marked_whether_communication_overlaps_or_not(bottleneck, stage):
    # The larger of both is 11 in stage 1, the sum 19 in stage 0.
    partition = make_partition([[0], [1]], compute=[10.0, 11.0], communication=[9.0, 0.5], bottleneck=bottleneck)
    (axes,) = draw_stages(partition).axes
    (span,) = [patch for patch in axes.patches if patch.get_label() == "bottleneck stage"]
    assert (span.get_x(), span.get_width()) == (stage - 0.5, 1)
    assert to_hex(span.get_facecolor()).upper() == VERMILION


@pytest.mark.parametrize("draw", [draw_cluster, draw_stages])
def test_missing_matplotlib_is_named(draw, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=f"{draw.__name__} draws with matplotlib.*pip install matplotlib"):
        draw(make_partition([[0]]))
