"""Published programs' modules, imported from clones untouched, or with a line that a user would write into them.

    load = Sources(Path("src/flax/examples/lm1b"), [Edit("EncoderDecoder1DBlock", "below", "...")])
    models, train = load("models"), load("train")

What a program imports and this machine does not have (input pipelines, metric writers) is stood in for by modules whose
attributes are mocks. Edited text is compiled in memory; nothing is written to the clones.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import itertools
import re
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import flax.linen as nn
import jax
from flax import nnx

import jaxpipe


#: Packages that published programs import for what no training step needs.
STOOD_IN = ("clu", "grain", "jaxtyping", "ml_collections", "sentencepiece", "tensorflow", "tensorflow_datasets")
STOOD_IN += ("tensorflow_text", "tensorboard", "tqdm")

#: Where a line goes: above or below a class, or above its first ``__call__``.
ABOVE, BELOW, CALL = "above", "below", "call"


@dataclass(frozen=True)
class Edit:
    """A line that is written into the module in which a class is."""

    cls: str
    place: str
    line: str


class Sources(importlib.abc.MetaPathFinder):
    """Imports from a folder, as if it were the first on ``sys.path``; what another one imported is forgotten."""

    _current: "Sources | None" = None

    def __init__(self, folder: Path, edits: Sequence[Edit] = ()):
        """Take the place of the last one.

        Args:
          folder: holds the modules.
          edits: lines to write into them.
        """
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is no folder; pass --sources FOLDER with the clones.")
        if Sources._current is not None:
            sys.meta_path.remove(Sources._current)
            for name in Sources._current._names:
                sys.modules.pop(name, None)
        self._folder, self._edits, self._names = folder, tuple(edits), list[str]()
        Sources._current = self
        sys.meta_path.insert(0, self)
        importlib.invalidate_caches()

    def __call__(self, name: str) -> Any:
        """Import a module."""
        return importlib.import_module(name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module of the folder, or that of one that is stood in for."""
        if name.partition(".")[0] in STOOD_IN:
            self._names.append(name)
            return importlib.machinery.ModuleSpec(name, _StandIns(), is_package=True)
        spec = importlib.machinery.PathFinder.find_spec(name, [str(self._folder)] if path is None else path)
        places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
        if spec is None or not any(Path(place).is_relative_to(self._folder) for place in places):
            return None
        if isinstance(spec.loader, importlib.machinery.SourceFileLoader) and spec.origin is not None:
            spec.loader = _Edited(name, spec.origin, self._edits)
        self._names.append(name)
        return spec


class _StandIns(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return jax.Array if name in ("Array", "ArrayLike") else MagicMock(name=name)


class _Edited(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, edits: Sequence[Edit]):
        super().__init__(name, path)
        self._edits = edits

    def get_code(self, fullname: str) -> types.CodeType:
        text = functools.reduce(edited, self._edits, self.get_data(self.path).decode())
        return compile(text, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: types.ModuleType) -> None:
        # What edited lines call, as if the module imported it.
        vars(module).update(
            jax=jax, nn=nn, nnx=nnx, jaxpipe=jaxpipe, **{f.__name__: f for f in (linen_remat, nnx_remat)}
        )
        super().exec_module(module)


def edited(text: str, edit: Edit) -> str:
    """Return a module's text with a line written into it, or as it is if the class is not in it.

    Example:
      >>> print(edited("class A:\\n    x = 1\\n\\n\\ny = 2\\n", Edit("A", BELOW, "A = f(A)")))
      class A:
          x = 1
      A = f(A)
      <BLANKLINE>
      <BLANKLINE>
      y = 2
      <BLANKLINE>
    """
    lines = text.splitlines()
    start = next((k for k, line in enumerate(lines) if re.match(rf"class {edit.cls}\b", line)), None)
    if start is None:
        return text
    inside = itertools.takewhile(lambda k: not lines[k] or lines[k][0] in " )", range(start + 1, len(lines)))
    body = [k for k in inside if lines[k].strip()]
    if edit.place == ABOVE:
        while lines[start - 1].startswith("@"):
            start -= 1
        lines.insert(start, edit.line)
    elif edit.place == BELOW:
        lines.insert(body[-1] + 1, edit.line)
    else:
        place = next(k for k in body if re.match(r"\s+def __call__\b", lines[k]))
        indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
        while lines[place - 1].strip().startswith("@"):
            place -= 1
        lines.insert(place, indent + edit.line)
    return "\n".join(lines) + "\n"


def linen_remat(cls: type, policy: Any = None, every: int = 1, static: tuple[int, ...] = ()) -> Callable[..., Any]:
    """Return ``nn.remat`` of a class for every so many of its modules; parameters keep their names."""
    other = nn.remat(cls, policy=policy, static_argnums=static)  # type: ignore[type-var]
    other.__name__ = cls.__name__
    return _every(cls, other, every)


def nnx_remat(cls: type, policy: Any = None, every: int = 1) -> Callable[..., Any]:
    """Return a class whose calls run under ``nnx.remat``, for every so many of its modules."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = {name: x for name, x in kwargs.items() if not isinstance(x, bool)}
        static = {name: x for name, x in kwargs.items() if isinstance(x, bool)}

        def run(module: Any, args: Any, named: Any) -> Any:
            return cls.__call__(module, *args, **named, **static)

        return nnx.remat(run, policy=policy)(self, args, named)

    other = type(cls)(cls.__name__, (cls,), {"__call__": __call__, "__module__": cls.__module__})
    return _every(cls, other, every)


def _every(cls: type, other: type, every: int) -> Callable[..., Any]:
    if every == 1:
        return other
    numbers = itertools.count()
    return lambda *args, **kwargs: (cls if next(numbers) % every else other)(*args, **kwargs)
