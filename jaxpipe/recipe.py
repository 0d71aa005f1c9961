"""``Recipe``: what a plan says of its programs, so exactly that they can be made again."""

from dataclasses import dataclass

from jaxpipe.text.checked_json import Amount, Count, Positive


@dataclass(frozen=True)
class StagePrograms:
    """The exact storage of a stage. Tensors are numbers in the traced program, and of what its backward pass adds.

    Attributes:
      formats: tensors by format, in order, runs abbreviated: ``{"keep": "3 7-9", "csr": "12x500"}``, with a sparse
        codec's capacity behind an ``x``.
      swapped: tensors that are in other memory between the passes.
      targets: stages on whose devices that is, -1 for the host's memory, each with its share.
    """

    formats: dict[str, str]
    swapped: str = ""
    targets: tuple[tuple[int, Amount], ...] = ()


@dataclass(frozen=True)
class Recipe:
    """All that ``partition(plan=)`` needs besides the rest of a plan to make the same programs again.

    Attributes:
      made_with: versions of what compiles programs, and the kind of device.
      mesh: the axes of the mesh that was given, and their sizes.
      devices: positions in that mesh, in the order of the pipeline's own mesh.
      batch: type and shape of each array of the batch, by path.
      storage: the codecs where a module is not decorated.
      settings: other arguments of ``partition`` on which programs depend, by name.
      variables, optimizer: digests of the model's variables, and of the optimizer's state and what it trains.
      program: a digest of the traced program.
      modules: the same by module.
      scan_groups: where scans over layers are cut.
      table: for each device its actions, tick by tick: ``"F0 F1 . B0 . B1"``, ``F0'1`` in its second stage.
      stage_of, versions, group, frozen, keeps_versions: as ``jaxpipe.schedules.Schedule`` has them.
      stages: what each stage stores.
    """

    made_with: str
    mesh: dict[str, Positive]
    devices: tuple[Count, ...]
    batch: dict[str, str]
    storage: str
    settings: dict[str, str]
    variables: str
    optimizer: str
    program: str
    modules: dict[str, str]
    scan_groups: tuple[tuple[Count, ...], ...]
    table: tuple[str, ...]
    stage_of: tuple[tuple[Count, ...], ...]
    versions: tuple[tuple[Count, ...], ...] | None
    group: Positive
    frozen: Count
    stages: tuple[StagePrograms, ...]
    keeps_versions: bool = True
