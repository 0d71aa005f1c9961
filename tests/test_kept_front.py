"""A larger budget takes the plan of a smaller one where that is faster, and is not refused where that is kept."""

import pytest

from jaxpipe.planning.kept_front import Point, add_point, better_point, read_front


def test_points_that_are_neither_smaller_nor_faster_are_dropped(tmp_path):
    path = tmp_path / "fronts" / "x.json"
    for point in (Point(10, 2.0, 12), Point(20, 1.0, 20), Point(15, 2.5, 15), Point(9, 3.0, 9), Point(10, 1.5, 30)):
        add_point(path, read_front(path), point)
    assert sorted(read_front(path)) == [(9, 3.0, 9), (10, 1.5, 30), (20, 1.0, 20)]
    for text in ("", "{}", "[[1]]", '[[1, "2", 3]]'):
        path.write_text(text)
        assert read_front(path) == []


@pytest.mark.parametrize(
    ("budget", "best", "expected"),
    [
        (25, (25, 2.0), (20, 1.0, 20)),
        (25, (25, 1.0), None),
        (19, (19, 2.0), None),
        (19, (30, 1.0), (10, 2.0, 12)),  # refused, though a plan of 10 is known
        (9, (30, 1.0), (10, 2.0, 12)),  # refused with more than that plan
        (9, (10, 9.0), None),
    ],
)
def test_the_fastest_point_within_a_budget_is_taken(budget, best, expected):
    front = [Point(10, 2.0, 12), Point(20, 1.0, 20)]
    assert better_point(front, budget, Point(*best, budget)) == expected
