"""What the pictures of a partition show, against literal tables."""

import itertools
import sys
from types import SimpleNamespace

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from jaxpipe import Network, Node
from jaxpipe.errors import NetworkError
from jaxpipe.partition_pictures import BOX_HEIGHT, BOX_WIDTH, IDLE, draw_cluster, draw_stages
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
    """The boxes of devices, which stand in front of those of groups."""
    (axes,) = figure.axes
    return [patch for patch in axes.patches if isinstance(patch, FancyBboxPatch) and patch.get_zorder() == 3]


def arrows(figure):
    return [patch for patch in figure.axes[0].patches if isinstance(patch, FancyArrowPatch)]


def words(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def group_titles(figure):
    """They come before the devices' texts."""
    texts = words(figure)
    return texts[: len(texts) - 2 * len(boxes(figure)) - len(arrows(figure))]


def test_cluster_shows_where_the_stages_are():
    figure = draw_cluster(make_partition([[0, 1], [3]]))
    # Node a has stage 0 twice; in node 1 the stage comes first, the idle device last.
    first, second = (
        ["stage 0", "a/0, 1x", "stage 0", "a/1, 1x"],
        ["stage 1", "node 1/1, 0.5x", "idle", "node 1/0, 0.5x"],
    )
    assert words(figure)[2:-1] == first + second
    colors = [to_hex(box.get_facecolor()).upper() for box in boxes(figure)]
    assert colors == [COMPONENT_COLORS[0], COMPONENT_COLORS[0], COMPONENT_COLORS[1], IDLE]
    assert figure.get_suptitle().startswith("2 stages on 3 of 4 devices\n")


def test_cluster_groups_devices_by_node():
    assert group_titles(draw_cluster(make_partition([[2], [0], [3], [1]]))) == ["node 1: 12 GB/s", "a: 50 GB/s"]


def test_cluster_groups_devices_by_bandwidth():
    fast, path, slow = 50e9, 16e9, 1e9
    rates = [[0, fast, path, slow], [fast, 0, path, slow], [path, path, 0, slow], [slow, slow, slow, 0]]
    figure = draw_cluster(make_partition([[0], [1], [2], [3]], Network(rates)))
    # 16 to 1 is the largest drop; device 3 is alone.
    assert group_titles(figure) == ["16 to 50 GB/s", ""]


def test_nearly_equal_links_make_one_group():
    rates = [[0, 10e9, 7e9], [10e9, 0, 8e9], [7e9, 8e9, 0]]
    assert group_titles(draw_cluster(make_partition([[0], [1], [2]], Network(rates)))) == ["7 to 10 GB/s"]


def test_cluster_shows_what_is_sent():
    figure = draw_cluster(make_partition([[0], [1], [2], [3]]))
    assert len(arrows(figure)) == 3
    # Down node a, across, and up node 1.
    assert words(figure)[-3:] == ["2.00 KiB, 50 GB/s", "4.00 KiB\n1.25 GB/s", "6.00 KiB, 12 GB/s"]


def test_the_slowest_link_between_two_stages_counts():
    assert words(draw_cluster(make_partition([[0], [1, 2]])))[-1] == "2.00 KiB, 1.25 GB/s"


def test_a_missing_link_is_shown():
    chain = Network([[0, 1e9, 0], [1e9, 0, 1e9], [0, 1e9, 0]])
    assert words(draw_cluster(make_partition([[0], [2]], chain)))[-1].endswith("no link")


def test_cluster_marks_the_bottleneck():
    figure = draw_cluster(make_partition([[0], [1], [2, 3]], compute=[1e-3, 2e-3, 4e-3]))
    assert [to_hex(box.get_edgecolor()) for box in boxes(figure)] == ["#ffffff", "#ffffff", "#000000", "#000000"]
    assert "bottleneck 4 ms in stage 2, lower bound 2 ms" in figure.get_suptitle()


@pytest.mark.parametrize(
    "nodes", [(1,), (16,), (8, 8), (4, 4, 4, 4), (2,) * 8, (1,) * 16, (5, 7, 4), (40, 3), (8,) * 4]
)
@pytest.mark.parametrize("step", [1, 3])
def test_nothing_is_drawn_on_top_of_another(nodes, step):
    network = Network.from_nodes([Node(count, 1e10) for count in nodes], 1e9)
    count = network.num_devices
    order = sorted(range(count), key=lambda k: (k % step, k))
    figure = draw_cluster(make_partition([[k] for k in order], network))
    (axes,) = figure.axes
    drawn = boxes(figure)
    assert len(drawn) == count and len(arrows(figure)) == count - 1
    for a, b in itertools.combinations(drawn, 2):
        assert abs(a.get_x() - b.get_x()) > BOX_WIDTH or abs(a.get_y() - b.get_y()) > BOX_HEIGHT
    # An inch is an inch, and everything is inside.
    width, height = figure.get_size_inches()
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    assert (right - left, high - low) == pytest.approx((width, height))
    for x, y in [text.get_position() for text in axes.texts]:
        assert left < x < right and low < y < high


@pytest.mark.parametrize("nodes", [(16,), (8, 8), (4, 4, 4, 4), (2,) * 8, (1,) * 16, (5, 7, 4), (8,) * 4])
def test_no_text_covers_another_where_stages_follow_the_devices(nodes):
    network = Network.from_nodes([Node(count, 15.75e9, speed=0.25) for count in nodes], 1.25e9)
    partition = make_partition([[k] for k in range(network.num_devices)], network)
    for stage in partition.stages:
        stage.sent_bytes = 1000 * 2**20  # as wide as it gets
    figure = draw_cluster(partition)
    renderer = FigureCanvasAgg(figure).get_renderer()
    texts = [text.get_window_extent(renderer) for text in figure.axes[0].texts]
    assert not [pair for pair in itertools.combinations(texts, 2) if pair[0].overlaps(pair[1])]
    links = texts[-len(arrows(figure)) :]
    assert not [box for box in boxes(figure) for text in links if text.overlaps(box.get_window_extent(renderer))]


def test_another_network_in_place_of_the_partitions_own():
    figure = draw_cluster(make_partition([[0], [1]]), Network.uniform(2, 7e9))
    assert words(figure)[-1] == "2.00 KiB, 7 GB/s"
    with pytest.raises(NetworkError, match=r"stage 1 on device 3; the network has devices 0\.\.1"):
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
