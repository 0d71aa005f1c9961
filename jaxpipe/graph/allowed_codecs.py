"""Codecs by module path."""

import fnmatch
import functools
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jaxpipe.errors import CodecWarning, ModelError, warn
from jaxpipe.graph.save_policy import SavePolicy, check_policy


#: Codec names, and what each lets a plan do.
CODECS = {
    "mask": "store booleans in 1 bit",
    "index": "store positions of pooling maxima in 1, 2 or 4 bits, those of sorted elements in 8 or 16",
    "alias": "take a view of what is stored",
    "recompute": "run cheap operators again",
    "bitmap": "store a map with many zeros as 1 bit for each element and the values that are not zero",
    "csr": "store a map that is nearly all zeros as values, column numbers and row offsets",
}

#: Named sets: what never slows a step, and everything.
CODEC_SETS = {"fast": frozenset(("mask", "index", "alias", "recompute")), "smallest": frozenset(CODECS)}

#: What ``memory_encoded(codecs=...)`` takes: a set of codecs, or module path patterns with a set for each.
Codecs = str | Iterable[str] | Mapping[str, str | Iterable[str]]


@dataclass(frozen=True)
class Policy:
    """The storage that a decoration allows its program.

    Attributes:
      rules: pairs of a pattern (``fits``) and codecs; the first pattern that fits a module path decides.
      saves: what stays stored, and what may be computed again, as ``jax.checkpoint`` takes it.
    """

    rules: tuple[tuple[str, frozenset[str]], ...]
    saves: SavePolicy | None = None

    def at(self, path: str) -> frozenset[str]:
        """The codecs that may be used for what is made at a module path."""
        return next((codecs for pattern, codecs in self.rules if fits(path, pattern)), CODEC_SETS["fast"])

    @property
    def name(self) -> str:
        """A word for the policy, legal in an identifier; equal for equal policies of this process."""
        number = "" if self.saves is None else f"_saves_{_numbers.setdefault(self.saves, len(_numbers))}"
        return self.codecs_name + number

    @property
    def codecs_name(self) -> str:
        """A word for the codecs, equal in all processes."""
        if len(self.rules) == 1 and self.rules[0][0] == "*":
            return "_".join(sorted(self.rules[0][1]))
        text = repr([(pattern, sorted(codecs)) for pattern, codecs in self.rules])
        return "by_path_" + hashlib.sha256(text.encode()).hexdigest()[:12]


@functools.lru_cache(maxsize=4096)
def fits(path: str, pattern: str) -> bool:
    """Return whether a pattern names a module path, a module that it lies in, or either without its outermost module.

    Patterns are those of a shell: ``*``, ``?``, ``[...]``. The iterations of a scan, as in ``Net/layers[0:4]``, are not
    part of a module's name.

    Example:
      >>> fits("Net/Encoder_0/Conv_1", "Encoder_*"), fits("Net/Encoder_0/Conv_1", "Conv_1")
      (True, False)
    """
    parts = re.sub(r"\[\d+:\d+\]", "", path).split("/")
    leading = ["/".join(parts[start:stop]) for start in (0, 1) for stop in range(start + 1, len(parts) + 1)]
    return any(fnmatch.fnmatchcase(module, pattern) for module in leading or [""])


def warn_unused(policy: Policy, paths: Iterable[str], argument: str) -> None:
    """Give a ``CodecWarning`` for each pattern of an argument that no module path of a program fits."""
    known = list(dict.fromkeys(paths))
    for pattern, _ in policy.rules:
        if known and not any(fits(path, pattern) for path in known):
            listed = ", ".join(path for path in known[:8] if path) or "none"
            more = ", ..." if len(known) > 8 else ""
            warn(
                f"{argument}={{{pattern!r}: ...}}: no module fits the pattern {pattern!r}, which changes nothing. "
                f"Module paths are {listed}{more}; a pattern names one, with or without its outermost module.",
                CodecWarning,
            )


def parse(codecs: Codecs, argument: str = "codecs", saves: SavePolicy | None = None) -> Policy:
    """Return the policy that an argument, called ``codecs`` or ``argument``, means, with what is saved besides."""
    check_policy(saves)
    rules = codecs if isinstance(codecs, Mapping) else {"*": codecs}
    policy = Policy(tuple((str(pattern), codec_set(chosen, argument)) for pattern, chosen in rules.items()), saves)
    _named[policy.name] = policy
    return policy


def by_name(name: str) -> Policy:
    """The policy whose ``name`` this is; it was parsed in this process."""
    return _named[name]


_named: dict[str, Policy] = {}
_numbers: dict[SavePolicy, int] = {}


def codec_set(codecs: str | Iterable[str], argument: str = "codecs") -> frozenset[str]:
    """The codecs that a name or a set of names stands for."""
    if isinstance(codecs, str) and codecs in CODEC_SETS:
        return CODEC_SETS[codecs]
    names = list(codecs) if isinstance(codecs, Iterable) and not isinstance(codecs, str) else [codecs]
    unknown = [name for name in names if not isinstance(name, str) or name not in CODECS]
    if unknown:
        raise ModelError(
            f"{argument}={codecs!r}: unknown codec {', '.join(sorted(map(repr, unknown)))}. Use one of the sets "
            f"{', '.join(map(repr, CODEC_SETS))}, a set of {', '.join(map(repr, CODECS))}, or a mapping from module "
            "path patterns to either."
        )
    return frozenset(names)


FAST = parse("fast")
SMALLEST = parse("smallest")
