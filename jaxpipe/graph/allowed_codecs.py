"""Codecs by module path."""

import fnmatch
import functools
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jaxpipe.errors import CodecWarning, ModelError, warn
from jaxpipe.graph.codec import Codec, check_own
from jaxpipe.graph.save_policy import SavePolicy, check_policy
from jaxpipe.graph.words import word_for
from jaxpipe.text.stable_text import stable_text


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

#: Names in reports that no codec of a user's may have.
_TAKEN = (*CODECS, "keep", "pool index", "vjp")

#: A set of codecs: by their names, by names of sets, and objects.
CodecSet = str | Codec | Iterable[str | Codec]

#: What ``memory_encoded(codecs=...)`` takes: a set of codecs, or module path patterns with a set for each.
Codecs = CodecSet | Mapping[str, CodecSet]


@dataclass(frozen=True)
class Policy:
    """The storage that a decoration allows its program.

    Attributes:
      rules: pairs of a pattern (``fits``) and codecs; the first pattern that fits a module path decides.
      saves: what stays stored, and what may be computed again, as ``jax.checkpoint`` takes it.
    """

    rules: tuple[tuple[str, frozenset[str | Codec]], ...]
    saves: SavePolicy | None = None

    def at(self, path: str) -> frozenset[str | Codec]:
        """The codecs that may be used for what is made at a module path."""
        return next((codecs for pattern, codecs in self.rules if fits(path, pattern)), CODEC_SETS["fast"])

    @functools.cached_property
    def name(self) -> str:
        """A word for the policy, legal in an identifier, by which ``by_word`` finds it; equal for equal policies."""
        return word_for(self, self.codecs_name + "_saves" * (self.saves is not None))

    @functools.cached_property
    def codecs_name(self) -> str:
        """A word for the codecs, equal in all processes."""
        words = [(pattern, sorted(map(_word, codecs))) for pattern, codecs in self.rules]
        plain = [pattern for pattern, _ in words] == ["*"] and all(isinstance(c, str) for c in self.rules[0][1])
        digest = hashlib.sha256(repr(words).encode()).hexdigest()[:12]
        return "_".join(words[0][1]) if plain else f"by_path_{digest}"


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
    by_path = codecs.items() if isinstance(codecs, Mapping) else [("*", codecs)]
    return Policy(tuple((str(pattern), codec_set(chosen, argument)) for pattern, chosen in by_path), saves)


def codec_set(codecs: CodecSet, argument: str = "codecs") -> frozenset[str | Codec]:
    """The codecs that a name, a codec, or a set of both stands for."""
    given = list(codecs) if isinstance(codecs, Iterable) and not isinstance(codecs, str) else [codecs]
    objects = [codec for codec in given if isinstance(codec, Codec)]
    names = [codec for codec in given if isinstance(codec, str) and (codec in CODECS or codec in CODEC_SETS)]
    unknown = [codec for codec in given if not isinstance(codec, Codec) and codec not in names]
    classes = [codec.__name__ for codec in unknown if isinstance(codec, type) and issubclass(codec, Codec)]
    if unknown:
        call = f" {classes[0]} is a class: pass an object of it, {classes[0]}()." if classes else ""
        raise ModelError(
            f"{argument}={codecs!r}: unknown codec {', '.join(sorted(map(repr, unknown)))}. Use one of the sets "
            f"{', '.join(map(repr, CODEC_SETS))}, a set of {', '.join(map(repr, CODECS))} and objects of "
            f"jaxpipe.Codec, or a mapping from module path patterns to either.{call}"
        )
    for codec in objects:
        check_own(codec, [*_TAKEN, *(getattr(other, "name", "") for other in objects if other != codec)], argument)
    return frozenset(objects).union(*(CODEC_SETS.get(name, {name}) for name in names))


def _word(codec: str | Codec) -> str:
    return codec if isinstance(codec, str) else stable_text(codec)


FAST = parse("fast")
SMALLEST = parse("smallest")
