"""The run-length code: every bit comes back, and codes that do not fit are refused."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.errors import PartitionError
from jaxpipe.gradients import run_length


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@given(pattern=st.lists(st.sampled_from([0.0, 0.0, 0.0, -0.0, 1.5, np.nan, np.inf]), max_size=40))
def test_round_trip(dtype, pattern):
    x = np.array(pattern, dtype)
    code = run_length.encode(x)
    bits = f"u{x.itemsize}"
    assert np.array_equal(run_length.decode(code).view(bits), x.view(bits))
    assert code.values.size == int((x.view(bits) != 0).sum())
    assert code.bytes == 8 * len(code.runs) + x.itemsize * code.values.size
    assert (code.runs[:, 1] > 0).all() and (code.runs[1:, 0] > 0).all()


def test_one_block_is_one_run():
    x = np.zeros((10, 27), np.float32)
    x[4] = 1
    code = run_length.encode(x)
    assert code.runs.tolist() == [[4 * 27, 27]] and run_length.decode(code).shape == (10, 27)


@pytest.mark.parametrize(
    "change",
    [
        {"runs": np.array([[3, 3], [2, 1]], np.uint32)},
        {"runs": np.array([[3, 2], [90, 1]], np.uint32)},
        {"values": np.ones(2, np.float32)},
        {"shape": (7,)},
    ],
)
def test_parts_that_do_not_belong_together(change):
    code = run_length.encode(np.array([0, 0, 0, 7, 3, 0, 0, 9], np.float32))
    with pytest.raises(PartitionError, match="do not fit"):
        run_length.decode(dataclasses.replace(code, **change))
