"""The table of the kernels' resources: its file and its comparison.

benchmarks/kernel_resources.json has the results of compile.py, and the compilers' versions. With
the same compilers the figures must be equal. With other compilers only the list of kernels is
compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

import triton
from pydantic import TypeAdapter

from benchmarks.engine.results import ROOT
from benchmarks.resources.cubin import output

TABLE = ROOT / "benchmarks" / "kernel_resources.json"
WRITE = "python -m benchmarks.resources.compile --write"

NO_KERNEL = "no kernel"
"""The entry of a .cu file that has no kernel for an architecture, where other kernels are used."""


@dataclass(frozen=True)
class Resources:
    """The resources of one kernel on one architecture.

    Attributes:
        registers: per thread, at most 255.
        stack: bytes per thread; more than 0 if registers are spilled or an array is indexed at
            run time.
        spills: bytes per thread that spill instructions move, stores and loads together.
        shared: bytes per block. For a .cu file they include the dynamic shared memory and, on
            Hopper and later, the 1,024 bytes that the system reserves.
    """

    registers: int = 0
    stack: int = 0
    spills: int = 0
    shared: int = 0


@dataclass(frozen=True)
class Compiled:
    """One kernel on one architecture; `error` is empty if it compiled and fits.

    If it has neither `needs` nor an error, `kernel` is a .cu file without a kernel for this GPU.
    """

    kernel: str
    arch: int
    needs: Resources | None = None
    error: str = ""


ROWS = TypeAdapter(list[Compiled])
"""Reads and writes results as JSON."""

Key = tuple[str, int]
"""A kernel, or a .cu file without one, and an architecture."""


@dataclass(frozen=True)
class Table:
    """Resources by kernel and architecture, None if a file has no kernel; compilers' versions."""

    compilers: Mapping[str, str]
    rows: dict[Key, Resources | None]

    @property
    def needs(self) -> dict[Key, Resources]:
        return {key: needs for key, needs in self.rows.items() if needs is not None}


def make_table(rows: Sequence[Compiled], compilers: Mapping[str, str]) -> Table:
    return Table(compilers, {(r.kernel, r.arch): r.needs for r in rows if not r.error})


def compiler_versions(nvcc: Path | None) -> dict[str, str]:
    """Return the versions of triton, of the two ptxas that it calls, and of nvcc."""
    knobs = triton.knobs.nvidia
    tools = {
        "ptxas": knobs.ptxas.path,
        "ptxas for sm_100 and later": getattr(knobs, "ptxas_blackwell", knobs.ptxas).path,
        "nvcc": nvcc,
    }
    versions = {"triton": str(triton.__version__)}
    for name, path in tools.items():
        if path is not None:
            (versions[name],) = re.findall(r"V(\d+\.\d+\.\d+)", output([str(path), "--version"]))
    return versions


def dump(table: Table) -> str:
    """Return the table as JSON with one line for each kernel, so that diffs are readable."""
    kernels: dict[str, dict[str, Any]] = {}
    for (name, arch), needs in table.rows.items():
        kernels.setdefault(name, {})[str(arch)] = astuple(needs) if needs else NO_KERNEL
    lines = [f"  {json.dumps(name)}: {json.dumps(kernels[name])}" for name in sorted(kernels)]
    columns = [field.name for field in fields(Resources)]
    return (
        f'{{\n "compilers": {json.dumps(dict(table.compilers))},\n'
        f' "columns": {json.dumps(columns)},\n "kernels": {{\n' + ",\n".join(lines) + "\n }\n}\n"
    )


def load(text: str) -> Table:
    content = json.loads(text)
    rows = {
        (name, int(arch)): None if row == NO_KERNEL else Resources(*row)
        for name, archs in content["kernels"].items()
        for arch, row in archs.items()
    }
    return Table(content["compilers"], rows)


def compare(kept: Table, current: Table) -> tuple[list[str], list[str]]:
    """Compare a committed table with the current compilation's.

    Returns:
        Differences, each a sentence; and notes on kernels that could not be compared.
    """
    names = {name for table in (kept, current) for name in table.compilers}
    other = sorted(n for n in names if kept.compilers.get(n) != current.compilers.get(n))
    notes = [
        f"{name} is {current.compilers.get(name, 'missing')} here and "
        f"{kept.compilers.get(name, 'missing')} in the table: figures of its kernels are not "
        "compared; all kernels must still be listed, compile and fit"
        for name in other
    ]
    wrong = []
    for key in sorted(kept.rows | current.rows):
        old, new = (_describe(table, key) for table in (kept, current))
        listed = key in kept.needs and key in current.needs
        if old != new and not (listed and set(_made_by(*key)) & set(other)):
            wrong.append(f"{key[0]}, sm_{key[1]}: {old} -> {new}")
    return wrong, notes


def _made_by(kernel: str, arch: int) -> tuple[str, ...]:
    if ".cu" in kernel:
        return ("nvcc",)
    return ("triton", "ptxas for sm_100 and later" if arch >= 100 else "ptxas")


def _describe(table: Table, key: Key) -> str:
    if key not in table.rows:
        return "not listed"
    needs = table.rows[key]
    return ", ".join(f"{n} {of}" for n, of in asdict(needs).items()) if needs else NO_KERNEL
