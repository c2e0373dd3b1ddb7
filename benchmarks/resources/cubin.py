"""Resource usage of compiled CUDA kernels: registers, stack, shared memory.

cuobjdump's table has the static shared memory. A launch requests the dynamic shared memory: the
overlay's cubins store its size as the second int of an array `NAME_launch`, where NAME is the
kernel's name without its dtype. The launcher reads the same array.
"""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import triton
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection


class Usage(NamedTuple):
    """One kernel's registers and stack bytes per thread, and bytes of shared memory per block."""

    registers: int
    stack: int
    static: int
    dynamic: int


def output(command: list[str]) -> str:
    """Run a compiler tool and return its stdout and stderr.

    Raises:
        RuntimeError: the tool failed; the message contains its output.
    """
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if run.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed:\n{run.stderr or run.stdout}")
    return run.stdout + run.stderr


def resource_usage(path: Path) -> dict[str, Usage]:
    """Return the resource usage of each kernel in a cubin, by the kernel's name.

    Raises:
        RuntimeError: cuobjdump cannot read the file; the message contains its output.
    """
    listing = output([triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)])
    rows = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", listing)
    with path.open("rb") as file:
        launches = dict(_launches(file))
    return {
        name: Usage(int(registers), int(stack), int(static), launches.get(_stem(name), 0))
        for name, registers, stack, static in rows
    }


def _stem(kernel: str) -> str:
    return kernel.removesuffix("_bf16").removesuffix("_fp16")


def _launches(file: BinaryIO) -> Iterator[tuple[str, int]]:
    """Yield each `NAME_launch` array's NAME and its second int."""
    elf = ELFFile(file)
    symbols = elf.get_section_by_name(".symtab")
    assert isinstance(symbols, SymbolTableSection)  # noqa: S101 nvcc and ptxas always write one
    for symbol in symbols.iter_symbols():
        name, section = symbol.name, symbol["st_shndx"]
        if name.endswith("_launch") and isinstance(section, int):  # else it is defined elsewhere
            data = elf.get_section(section).data()
            _, dynamic = struct.unpack_from("<2i", data, symbol["st_value"])
            yield name.removesuffix("_launch"), dynamic
