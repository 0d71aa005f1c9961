"""Why a tensor is stored: a label that each array of a stash carries through JAX's tracing."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from jaxpipe.array_types import TensorNumber
from jaxpipe.graph.graph import Operator, join_paths
from jaxpipe.graph.op_cost import contraction, is_product, rerun_work
from jaxpipe.graph.words import word_for
from jaxpipe.residuals.choose_formats import recomputation
from jaxpipe.residuals.codecs.keep import KEEP
from jaxpipe.residuals.vjp_program import VJPProgram


#: Stash leaves carry a ``checkpoint_name`` that starts with this.
MARK = "jaxpipe stores "


@dataclass(frozen=True)
class StoredTensor:
    """One array that crosses from the forward to the backward pass.

    Attributes:
      producer: the module path and operator that made the tensor.
      shape, dtype: of the tensor, before it was encoded.
      storage: ``"keep"``, ``"mask"``, ``"pool index"``, ``"index"``, ``"bitmap"``, ``"csr"`` for encoded parts,
        the name of a codec of one's own, ``"vjp"`` for what JAX saves by itself.
      bytes: what is stored.
      readers: the steps of the backward pass that use it, itself or something recomputed from it.
      otherwise: what would be kept or computed instead.
    """

    producer: str
    shape: tuple[int, ...]
    dtype: str
    storage: str
    bytes: int
    readers: tuple[str, ...] = ()
    otherwise: str = ""


@dataclass(frozen=True)
class Label:
    """The description of an array of a stash.

    Attributes:
      number: of the tensor in its graph.
      part: which of its arrays this is.
      codec: a word by which ``by_word`` finds how it is stored.
      tensor: the tensor, its bytes left open.
    """

    number: TensorNumber
    part: int
    codec: str
    tensor: StoredTensor


def labels(vjp: VJPProgram) -> Callable[[TensorNumber, int], str]:
    """Return a function that gives the label of one array of a stash, by tensor and part, as text."""
    readers, producers = _readers(vjp), vjp.graph.producers
    available = vjp.graph.derived_from_parameters

    def label(number: TensorNumber, part: int) -> str:
        producer, tensor, codec = producers[number], vjp.graph.tensors[number], vjp.plan.codecs[number]
        otherwise, read = _otherwise(vjp, number, producer, available), tuple(readers.get(number, ()))
        stored = StoredTensor(producer.place, tensor.shape, str(tensor.dtype), codec.name, 0, read, otherwise)
        known = Label(number, part, word_for(codec, repr(codec)), stored)
        return MARK + msgspec.json.encode(known).decode()

    return label


def parse_label(text: str) -> Label | None:
    """Return the label that a text is, if it is one."""
    return msgspec.json.decode(text.removeprefix(MARK), type=Label) if text.startswith(MARK) else None


def _readers(vjp: VJPProgram) -> dict[TensorNumber, dict[str, None]]:
    """Return the names of the backward steps that read each stored tensor, in order."""
    available = vjp.graph.derived_from_parameters
    readers: dict[TensorNumber, dict[str, None]] = defaultdict(dict)
    for step in vjp.backward_graph.steps:
        for t in recomputation(vjp.graph, step.needs, vjp.plan, available)[1]:
            readers[t][join_paths(step.path, step.label)] = None
    return readers


def _otherwise(vjp: VJPProgram, number: TensorNumber, producer: Operator, available: frozenset[TensorNumber]) -> str:
    if vjp.plan.formats[number] != KEEP:
        tensor = vjp.graph.tensors[number]
        return f"kept as {tensor.dtype}, {tensor.bytes:,} bytes"
    if is_product(producer):
        return f"computed again, {contraction(producer.equation):,} products for each element"
    sources = {t for t in producer.inputs if t not in available}
    if rerun_work(producer) is None or not sources:
        return "computed again"
    size = sum(vjp.graph.tensors[t].bytes for t in sources)
    return f"computed again from {size:,} bytes of inputs, kept in its place"
