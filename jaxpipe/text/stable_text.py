"""Values and traced programs as text that depends on nothing but what they are.

The text is the same in every process, on every terminal and in every run: no color, no width, no memory address, no
order of a set. Whatever is compared between processes, or names something that is kept on disk, is made of it.
"""

import dataclasses
import enum
import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.sharding import Mesh

from jaxpipe import _compat
from jaxpipe.array_types import Atom


#: What differs from run to run in texts that others write: memory addresses, and colors on a terminal.
_PASSING = re.compile(r" at 0x[0-9a-f]+|\x1b\[[0-9;]*m")

_PLAIN = (type(None), bool, int, float, complex, str, bytes)

#: Attributes that traced programs have, and nothing else does.
_PROGRAM = ("eqns", "invars", "outvars")


def stable_text(value: object, values: bool = True) -> str:
    """Return a value as text.

    Args:
      value: anything: numbers, arrays, containers, dataclasses, programs. A function is told by its name, an object of
        which nothing is known by its ``repr``.
      values: whether arrays with axes are told by a digest of their values, and not by shape and type alone.

    Example:
      >>> stable_text({"b": 1, "a": np.zeros((2, 3), np.float32)}, values=False)
      "{'a': float32[2, 3], 'b': 1}"
    """
    return writer(values)(value)


def writer(values: bool = True) -> Callable[[object], str]:
    """Return ``stable_text`` for many values that share programs, each of which is written once."""
    return _Writer(values).text


def digest(text: str | bytes) -> str:
    """Return a short name for a text: of two that differ it differs."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:32]


class _Writer:
    """Writes values; remembers programs and arrays, many of which are used often."""

    def __init__(self, values: bool):
        self._values = values
        self._types: dict[ShapedArray, str] = {}
        self._known: dict[int, tuple[object, str]] = {}  # with the object, whose number no other then gets

    def text(self, value: Any) -> str:
        """Return a value as text."""
        if isinstance(value, _PLAIN) and not isinstance(value, enum.Enum):
            return repr(value)
        if isinstance(value, enum.Enum):
            return f"{type(value).__qualname__}.{value.name}"
        if isinstance(value, np.ndarray | np.generic | jax.Array) and not isinstance(value, Tracer):
            return self._once(value, self._array)
        if isinstance(value, type):
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, ShapedArray):
            if value not in self._types:
                self._types[value] = self._object(value)
            return self._types[value]
        if all(hasattr(value, name) for name in _PROGRAM) or hasattr(value, "jaxpr"):
            return self._once(value, self._program)
        if isinstance(value, Mesh):
            devices = [] if value.empty else [(d.id, d.process_index) for d in value.devices.flat]
            return f"Mesh({dict(value.shape)}, {devices}, {self.text(value.axis_types)})"
        return self._container(value) or self._object(value)

    def _container(self, value: Any) -> str:
        """Return a container as text; empty for what is none."""
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            names: Sequence[str] = value._fields  # pyright: ignore[reportAttributeAccessIssue]
            fields = (f"{name}={self.text(x)}" for name, x in zip(names, value, strict=True))
            return f"{type(value).__qualname__}({', '.join(fields)})"
        if isinstance(value, Mapping):
            return "{" + ", ".join(sorted(f"{self.text(k)}: {self.text(x)}" for k, x in value.items())) + "}"
        if isinstance(value, Set):
            return "{" + ", ".join(sorted(map(self.text, value))) + "}"
        if isinstance(value, list | tuple) or (isinstance(value, Sequence) and not hasattr(value, "dtype")):
            return f"[{', '.join(map(self.text, value))}]"
        if dataclasses.is_dataclass(value):
            fields = (f"{f.name}={self.text(getattr(value, f.name))}" for f in dataclasses.fields(value) if f.repr)
            return f"{type(value).__qualname__}({', '.join(fields)})"
        return ""

    def _object(self, value: Any) -> str:
        if isinstance(value, functools.partial):
            return f"partial({self.text(value.func)}, {self.text(value.args)}, {self.text(value.keywords)})"
        if inspect.ismethod(value):
            return f"{self.text(type(value.__self__))}.{value.__name__}"
        if hasattr(value, "str_short"):
            return f"{value.str_short()}{'*' if getattr(value, 'weak_type', False) else ''}"
        if callable(value):
            name = getattr(value, "__qualname__", None)
            return self.text(type(value)) if name is None else f"{value.__module__}.{name}"
        return _PASSING.sub("", repr(value))

    def _array(self, x: Any) -> str:
        form = f"{x.dtype}{list(x.shape)}"
        if x.shape and not self._values:
            return form
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return form  # nobody has all of it
        host = np.asarray(x)
        data = host.tobytes() if host.size < 8 else np.ascontiguousarray(host).reshape(-1).view(np.uint8).data
        return f"{form}({data.hex() if host.size < 8 else digest(data)})"  # pyright: ignore[reportArgumentType]

    def _once(self, value: Any, write: Callable[[Any], str]) -> str:
        if id(value) not in self._known:
            self._known[id(value)] = value, write(value)
        return self._known[id(value)][1]

    def _program(self, program: Any) -> str:
        """Return a digest of a program; in it, variables are numbered in the order in which they are met."""
        jaxpr, consts = _compat.open_jaxpr(program)
        numbers: dict[Atom, int] = {}

        def atom(x: Atom) -> str:
            if _compat.is_literal(x):
                return f"{self.text(x.val)}:{self.text(x.aval)}"
            return f"%{numbers.setdefault(x, len(numbers))}"

        def typed(atoms: Sequence[Atom]) -> str:
            return ", ".join(f"{atom(x)}:{self.text(x.aval)}" for x in atoms)

        lines = [f"{typed(jaxpr.constvars)}; {typed(jaxpr.invars)}; {self.text(consts)}"]
        for equation in jaxpr.eqns:
            what = f"{equation.primitive.name} {self.text(equation.params)} {self.text(equation.ctx)}"
            lines.append(f"{typed(equation.outvars)} = {what} {', '.join(map(atom, equation.invars))}")
        lines.append(f"-> {', '.join(map(atom, jaxpr.outvars))}")
        return f"program {digest(chr(10).join(lines))}"
