"""JSON files that any process may read, and that may be deleted at any time.

They are in ``$JAXPIPE_CACHE_DIR``, or else in the user's cache folder, under a digest of all that their contents depend
on.
"""

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import platformdirs

from jaxpipe.text.stable_text import digest


T = TypeVar("T")


#: Environment variable that names the folder.
FOLDER = "JAXPIPE_CACHE_DIR"

#: At most so many files of a folder are kept, those that were written last.
MOST_KEPT = 1000


def kept_path(kind: str, text: str) -> Path:
    """Return the file of a kind of contents, all of which depend on what a text says."""
    chosen = os.environ.get(FOLDER)
    folder = Path(chosen) if chosen else platformdirs.user_cache_path("jaxpipe", appauthor=False)
    return folder / kind / f"{digest(text)}.json"


def read_kept(path: Path, kind: type[T]) -> T | None:
    """Return the contents of a JSON file; None if there is no such file, or it has no data of this kind."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(path.read_bytes(), type=kind)
    return None


def write_whole(path: Path, text: str) -> None:
    """Write a file and its folder: other processes see all of it or nothing. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def keep(path: Path, data: Any) -> None:
    """Write data to a file; where that is not possible, the next process does the work again."""
    with contextlib.suppress(OSError):
        write_whole(path, json.dumps(data))
        for old in sorted(path.parent.glob("*.json"), key=lambda other: other.stat().st_mtime)[:-MOST_KEPT]:
            old.unlink(missing_ok=True)
