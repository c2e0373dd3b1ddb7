"""What compiled CUDA code says of its kernels: registers, stack, shared memory.

The static part is in cuobjdump's table. The dynamic part is what a launch asks for: the overlay's
kernels keep it in the code, as the second of two ints named like the kernel without its dtype and
with `_launch`, which the launcher reads.
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
    """One kernel's: registers and bytes of stack a thread, bytes of shared memory a block."""

    registers: int
    stack: int
    static: int
    dynamic: int


def output(command: list[str]) -> str:
    """Return what a compiler's tool says.

    Raises:
        RuntimeError: it failed; its words follow.
    """
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if run.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed:\n{run.stderr or run.stdout}")
    return run.stdout + run.stderr


def resource_usage(path: Path) -> dict[str, Usage]:
    """Return what each kernel of a cubin takes, by its name.

    Raises:
        RuntimeError: cuobjdump cannot read the file; its words follow.
    """
    said = output([triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)])
    rows = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", said)
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
