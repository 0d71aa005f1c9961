"""Tasks, lowered and compiled: once for all that compute the same.

tasks ──form──▶ equal ones are lowered and compiled once, in parallel threads ──▶ executables, loaded on each device
"""

import functools
import itertools
import os
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled, Lowered

from jaxpipe import _compat, multihost
from jaxpipe.array_types import Array, Device
from jaxpipe.graph.program_form import shared_program
from jaxpipe.runtime.mpmd.step_graph import Task, TaskAt
from jaxpipe.text.progress import tell


#: Compiled work: takes the operands that are read, returns the results that are written.
Call: TypeAlias = Callable[..., Sequence[Array]]


@dataclass(frozen=True, eq=False)
class CompileJob:
    """A task to be compiled."""

    task: Task
    donated: frozenset[int]  # positions, among the operands that are read, of arrays that it may write over
    mesh: Mesh  # that it runs on
    reads: tuple[P, ...]  # by operand
    writes: tuple[P | None, ...]  # by result; None where XLA chooses

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices."""
        return tuple(self.mesh.devices.flat)

    @property
    def is_bound(self) -> bool:
        """True if its program is lowered for its very devices: they are absent, or it calls Python on their host."""
        return _compat.is_absent(self.devices[0]) or _compat.needs_devices(self.task.program.closed)


@dataclass(frozen=True)
class Needs:
    """Needs of a compiled task on each device besides operands and results, and how it splits its results."""

    label: str
    temporary_bytes: int = 0  # besides both
    alias_bytes: int = 0  # of results that are written over operands
    writes: tuple[P, ...] = ()  # by result


class Executable(NamedTuple):
    """A compiled task."""

    run: Call
    needs: Needs


def compile_jobs(jobs: Mapping[TaskAt, CompileJob], platform: str) -> dict[TaskAt, Executable]:
    """Compile this process's work, what is equal once, in as many threads as there are processors.

    Takes the jobs of all processes, as equal work has one program in all of them; returns its own.
    """
    groups: dict[Hashable, list[TaskAt]] = {}
    for name, job in jobs.items():
        where = job.devices if job.is_bound else tuple(job.mesh.shape.items())
        groups.setdefault((job.task.program.form, job.donated, where, job.reads, job.writes), []).append(name)
    local_jobs = {name for name, job in jobs.items() if multihost.mine(job.devices)}
    local_groups = [names for names in groups.values() if not local_jobs.isdisjoint(names)]
    tell(f"Compiling {len(local_jobs)} programs, {len(local_groups)} of which differ")
    done = itertools.count(1)

    def build(equal: Sequence[CompileJob], lowered: Lowered, rows: Sequence[np.ndarray | None]) -> list[Executable]:
        built = _compile(equal, lowered, rows)
        tell(f"Compiled {next(done)} of {len(local_groups)} programs: {equal[0].task.label}")
        return built

    with warnings.catch_warnings(), ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        # A stash is donated to be freed; few results have the shape of one of its arrays.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        started: list[tuple[list[TaskAt], Future[list[Executable]]]] = []
        for names in local_groups:
            lowered, rows = _lower([jobs[name] for name in names], platform)
            here = {name: row for name, row in zip(names, rows, strict=True) if name in local_jobs}
            run = pool.submit(build, [jobs[name] for name in here], lowered, list(here.values()))
            started.append((list(here), run))
        return {name: built for here, run in started for name, built in zip(here, run.result(), strict=True)}


def _compile(jobs: Sequence[CompileJob], lowered: Lowered, rows: Sequence[np.ndarray | None]) -> list[Executable]:
    """Compile equal work once, for the first job's devices, and make it run on those of the others."""
    first, *others = jobs
    if first.is_bound:  # equal work is for the same devices
        program = lowered.compile()
        calls = [program] * len(jobs)
    else:
        program = lowered.compile(device_assignment=first.devices)
        calls = [_compat.direct_call(program), *_elsewhere(program, lowered, others)]
    sizes = program.memory_analysis()
    assert sizes is not None
    chosen = program.output_shardings if None in first.writes else ()
    writes = tuple(chosen[k].spec if spec is None else spec for k, spec in enumerate(first.writes))
    return [
        Executable(
            call if row is None else _with_row(call, row, job.mesh),
            Needs(job.task.label, sizes.temp_size_in_bytes, sizes.alias_size_in_bytes, writes),
        )
        for job, call, row in zip(jobs, calls, rows, strict=True)
    ]


def _elsewhere(program: Compiled, lowered: Lowered, jobs: Sequence[CompileJob]) -> list[Call]:
    """Load a compiled program on other devices, or compile it again where that cannot be done."""
    if jobs and all(job.mesh.size == 1 for job in jobs):
        loaded = _compat.loaded_on(program, [job.devices[0] for job in jobs])
        if loaded is not None:
            return loaded
    return [_compat.direct_call(lowered.compile(device_assignment=job.devices)) for job in jobs]


def _lower(jobs: Sequence[CompileJob], platform: str) -> tuple[Lowered, list[np.ndarray | None]]:
    """Lower equal work; numbers that keys are folded with become an operand where they differ, given by job."""
    first = jobs[0]
    program = shared_program([job.task.program for job in jobs])
    rows = [np.array([value for _, value in job.task.program.folds], np.uint32) for job in jobs]
    varies = any((row != rows[0]).any() for row in rows)
    mesh = first.mesh if first.is_bound else _abstract(first.mesh)

    def function(*operands: Array) -> Sequence[Array]:
        return program(*operands) if varies else program(rows[0], *operands)

    # The name of the module, by which traces call what runs on a device; equal work of several stages is one.
    function.__name__ = first.task.label.rpartition(": ")[2].replace(" ", "_").replace(",", "")
    offset = 1 if varies else 0
    avals = [jax.ShapeDtypeStruct(rows[0].shape, np.uint32)] * offset + [*first.task.read_avals]
    shaped = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))
        for a, spec in zip(avals, (*(P(),) * offset, *first.reads), strict=True)
    ]
    donated = tuple(sorted(offset + k for k in first.donated))
    to = tuple(None if spec is None else NamedSharding(mesh, spec) for spec in first.writes)
    jitted = jax.jit(function, donate_argnums=donated, out_shardings=to, keep_unused=True)
    return _compat.lower(jitted.trace(*shaped), platform), [row if varies else None for row in rows]


def _abstract(mesh: Mesh) -> AbstractMesh:
    return AbstractMesh(mesh.devices.shape, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


def _with_row(compiled: Call, row: np.ndarray, mesh: Mesh) -> Call:
    """Bind the first operand of an executable, in the memory of its devices."""

    @functools.cache
    def held() -> Array:  # at the first call, as a program may be compiled for devices that are not here
        return multihost.place(row, NamedSharding(mesh, P()))

    return lambda *operands: compiled(held(), *operands)
