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
from typing import NamedTuple

import triton

_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr: name, type, flags, address, offset, size, ...
_SYMBOL = struct.Struct("<IBBHQQ")  # Elf64_Sym: name, info, other, section, value, size
_SYMBOLS = 2  # SHT_SYMTAB


class Usage(NamedTuple):
    """One kernel's: registers and bytes of stack a thread, bytes of shared memory a block."""

    registers: int
    stack: int
    static: int
    dynamic: int


def resource_usage(path: Path) -> dict[str, Usage]:
    """Return what each kernel of a cubin takes, by its name.

    Raises:
        RuntimeError: cuobjdump cannot read the file; its words follow.
    """
    tool = triton.knobs.nvidia.cuobjdump.path
    command = [tool, "--dump-resource-usage", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if run.returncode:
        raise RuntimeError(f"cuobjdump failed:\n{run.stderr or run.stdout}")
    rows = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", run.stdout)
    launches = dict(_launches(path.read_bytes()))
    return {
        name: Usage(int(registers), int(stack), int(static), launches.get(_stem(name), 0))
        for name, registers, stack, static in rows
    }


def _stem(kernel: str) -> str:
    return kernel.removesuffix("_bf16").removesuffix("_fp16")


def _launches(code: bytes) -> Iterator[tuple[str, int]]:
    """Yield each `NAME_launch` array's NAME and its second int."""
    (start,) = struct.unpack_from("<Q", code, 0x28)
    size, count = struct.unpack_from("<HH", code, 0x3A)
    sections = [_SECTION.unpack_from(code, start + i * size) for i in range(count)]
    for _, kind, _, _, table, length, names, *_ in sections:
        if kind != _SYMBOLS:
            continue
        strings = sections[names][4]
        for place in range(table, table + length, _SYMBOL.size):
            name, _, _, section, value, _ = _SYMBOL.unpack_from(code, place)
            first = strings + name
            text = code[first : code.index(b"\0", first)].decode()
            if text.endswith("_launch") and section < count:
                _, dynamic = struct.unpack_from("<2i", code, sections[section][4] + value)
                yield text.removesuffix("_launch"), dynamic
