"""Saves that fail, and directories that two Checkpointers want."""

import contextlib
import functools
import pathlib
import resource
import time

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpipe
from jaxpipe.checkpoint import steps
from jaxpipe.errors import CheckpointError
from tests.support.compare import assert_same_bits


@functools.cache
def large_pipeline():
    """Return a pipeline whose state has 512 KiB that cannot be compressed."""
    model = jax.tree_util.Partial(lambda w, x: x @ w, jax.random.normal(jax.random.key(0), (256, 512)))
    return jaxpipe.partition(
        model,
        jax.sharding.Mesh(jax.devices()[:1], ("stage",)),
        jnp.ones((2, 256)),
        loss=lambda f, x: f(x).mean(),
        optimizer=optax.sgd(0.1),
        profile="analytic",
    )


@contextlib.contextmanager
def full_disk():
    """No file of this process can be longer than 128 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def saved_in_the_background(checkpointer):
    while checkpointer._writer._manager.is_saving_in_progress():
        time.sleep(0.01)


FAILED = r"The checkpoint of step 2 could not be written to directory=.*Complete are those of: 1\. Training can go on"


# orbax leaves an event loop of what has failed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("every", [1, 2])
def test_a_save_that_fails_is_told_at_the_next_step(every, tmp_path):
    pipeline = large_pipeline()
    batch = jnp.ones((2, 256))
    state = pipeline.init(jax.random.key(0))
    with jaxpipe.Checkpointer(pipeline, tmp_path, every=every, keep=None) as checkpointer:
        state, _ = pipeline.step(state, batch)
        checkpointer.save(state)
        checkpointer.wait()
        state, _ = pipeline.step(state, batch)
        with full_disk():
            checkpointer.after_step(state)
            saved_in_the_background(checkpointer)
        state, _ = pipeline.step(state, batch)
        with pytest.raises(jaxpipe.CheckpointError, match=FAILED):
            checkpointer.after_step(state)  # step 3, which is due if every=1
        state, _ = pipeline.step(state, batch)
        checkpointer.after_step(state)
    assert steps(tmp_path) == ([1, 3, 4] if every == 1 else [1, 4])
    assert_same_bits(pipeline.restore(tmp_path), state)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # see above
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("how", ["wait", "close", "save"])
def test_a_save_that_fails_is_told_by_all_who_wait(how, tmp_path):
    pipeline = large_pipeline()
    state = pipeline.init(jax.random.key(0))
    message = r"step 0 could not be written to directory=.*Complete are those of: none"
    with full_disk(), pytest.raises(jaxpipe.CheckpointError, match=message):
        if how == "save":
            pipeline.save(state, tmp_path)
        else:
            checkpointer = jaxpipe.Checkpointer(pipeline, tmp_path)
            with contextlib.closing(checkpointer):
                checkpointer.save(state)
                if how == "wait":
                    checkpointer.wait()
    pipeline.save(state, tmp_path)
    assert steps(tmp_path) == [0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file", "File exists|Not a directory"),
        ("file/below", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("gs://bucket/run", "remote store"),
        (pathlib.Path("gs://bucket/run"), "remote store"),
        ("a\0b", "path of a folder"),
        ("", "path of a folder"),
        (3, "path of a folder"),
    ],
    ids=str,
)
def test_what_is_no_folder_is_told_as_such(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    pipeline = large_pipeline()
    with pytest.raises(CheckpointError, match=message):
        pipeline.save(pipeline.init(jax.random.key(0)), name)
    with pytest.raises(CheckpointError, match=message):
        jaxpipe.Checkpointer(pipeline, name)
    with pytest.raises(CheckpointError):
        pipeline.restore(name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("options", [{"every": "3"}, {"every": 2.5}, {"every": None}, {"keep": True}, {"keep": "all"}])
def test_counts_of_a_checkpointer_are_whole_numbers(options, tmp_path):
    (name,) = options
    with pytest.raises(CheckpointError, match=f"{name}=.* whole number"):
        jaxpipe.Checkpointer(large_pipeline(), tmp_path, **options)


def test_a_checkpointer_takes_a_pipeline(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"Checkpointer\(pipeline, directory\) was given 3 \(int\); pass the Pipel"
    ):
        jaxpipe.Checkpointer(3, tmp_path)


def test_folders_that_are_not_named_as_steps_are_none(tmp_path):
    for name in ("007", "1e3", "²"):
        (tmp_path / name).mkdir()
    assert jaxpipe.Checkpointer(large_pipeline(), tmp_path).steps == []


def test_a_directory_has_one_checkpointer(tmp_path):
    """Two of one process, which is what a notebook's cell makes when it is run again."""
    pipeline = large_pipeline()
    state = pipeline.init(jax.random.key(3))
    (tmp_path / "link").symlink_to(tmp_path / "run")
    first = jaxpipe.Checkpointer(pipeline, tmp_path / "run")
    for name in ("run", "link"):
        with pytest.raises(jaxpipe.CheckpointError, match="is open in another Checkpointer of this process"):
            jaxpipe.Checkpointer(pipeline, tmp_path / name)
        with pytest.raises(jaxpipe.CheckpointError, match="is open in another Checkpointer of this process"):
            pipeline.save(state, tmp_path / name)
    first.save(state)
    first.close()
    assert_same_bits(pipeline.restore(tmp_path / "run"), state)
    with pytest.raises(jaxpipe.CheckpointError, match="was closed"):
        first.save(state)
    # One that nobody has closed, and nobody has any more, is no obstacle.
    state, _ = pipeline.step(state, jnp.ones((2, 256)))
    forgotten = jaxpipe.Checkpointer(pipeline, tmp_path / "run")
    forgotten.save(state)
    del forgotten
    with jaxpipe.Checkpointer(pipeline, tmp_path / "link") as other:
        assert other.steps == [0, 1]
