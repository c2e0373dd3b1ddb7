"""A seccomp filter that closes kernel interfaces to the code of a miner's fork.

Namespaces would let the fork mount a tmpfs that no limit counts. Keyrings outlive an evaluation.
io_uring, bpf and perf have had many sandbox escapes. A network namespace does not separate vsock,
which reaches the hypervisor. The sandbox's memory limit cannot count System V segments that no
process has attached. With prlimit(2), the fork could keep the referee, the process that judges it,
from opening the GPU; with priorities, it could slow the referee down.

All other calls of the 64-bit ABI, which `_CALLS` does not list, are allowed, because the CUDA
driver needs many of them (ioctl, mmap, poll, eventfd, memfd_create). With a GPU, the driver also
needs sched_setaffinity, which is therefore forbidden only in a sandbox without one (`pinned`).
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
"""Instructions of classic BPF (linux/bpf_common.h), each with a constant operand."""
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in `struct seccomp_data`. A load reads 32 bits, so it reads only the low half of an
argument, which comes first (little-endian)."""
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_X32 = 0x40000000
"""System calls from this number on belong to the x32 ABI, which numbers them differently."""
_NEW_NAMESPACES = 0x7E020000
"""The flags of clone(2) that make a namespace."""
_FAMILIES = (1, 2, 10, 16)
"""Allowed address families, which namespaces separate: Unix, IPv4, IPv6 and netlink."""

_CALLS = {
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "unshare": (272, 97),
    "setns": (308, 268),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "syslog": (103, 116),
    "shmget": (29, 194),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "prlimit64": (302, 261),
    "clone": (56, 220),
    "clone3": (435, 435),
    "socket": (41, 198),
    "sched_setaffinity": (203, 122),
}
"""Numbers of the forbidden calls on x86_64 and aarch64; `_OWN_ONLY` and `_SPECIAL` have the
exceptions."""

_OWN_ONLY = {
    "sched_setparam": ((0, 0),),
    "sched_setscheduler": ((0, 0),),
    "sched_setattr": ((0, 0),),
    "setpriority": ((0, 0), (1, 0)),  # PRIO_PROCESS
    "ioprio_set": ((0, 1), (1, 0)),  # IOPRIO_WHO_PROCESS
    "prlimit64": ((0, 0),),
}
"""Calls that a process may make only for itself. Each pair is the position of an argument and the
value that it must have; together, the pairs name the calling process."""

_SPECIAL = ("clone", "clone3", "socket", "sched_setaffinity")
"""Calls with a rule of their own, in `_instructions` or, for sched_setaffinity, `assemble`."""


@dataclass(frozen=True)
class Architecture:
    """An architecture of Linux and the numbers of its system calls."""

    audit: int  # the architecture's number in `struct seccomp_data`
    calls: dict[str, int]


ARCHITECTURES = {
    "x86_64": Architecture(0xC000003E, {name: both[0] for name, both in _CALLS.items()}),
    "aarch64": Architecture(0xC00000B7, {name: both[1] for name, both in _CALLS.items()}),
}

INSTALL = """
import ctypes, os, sys
program = bytes.fromhex(sys.argv[1])
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]
libc = ctypes.CDLL(None, use_errno=True)
installed = Program(len(program) // 8, program)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(installed), 0, 0):
    sys.exit("Linux does not accept a seccomp filter: " + os.strerror(ctypes.get_errno()))
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Installs the filter that its first argument contains, and executes the command in the further
arguments. The prctl options are 38 (PR_SET_NO_NEW_PRIVS) and 22 (PR_SET_SECCOMP)."""


def this_architecture() -> Architecture | None:
    """Return this machine's architecture; None if this module does not know its system calls."""
    return ARCHITECTURES.get(platform.machine())


def assemble(architecture: Architecture, *, pinned: bool) -> bytes:
    """Return the filter as an array of `struct sock_filter`.

    `pinned` forbids sched_setaffinity. The sandbox checks only from time to time which cores the
    fork uses (`Sandbox.exceeded`), and could miss a short use of others.
    """
    allowed = {*_OWN_ONLY, *_SPECIAL} - ({"sched_setaffinity"} if pinned else set())
    denied = {number for name, number in architecture.calls.items() if name not in allowed}
    return b"".join(struct.pack("<HBBI", *one) for one in _instructions(architecture, denied))


Instruction = tuple[int, int, int, int]
"""The code, the instructions skipped if true and if false, and the operand."""


def _instructions(architecture: Architecture, denied: set[int]) -> Iterator[Instruction]:
    forbidden, missing = _FAIL | errno.EPERM, _FAIL | errno.ENOSYS
    yield _LOAD, 0, 0, _ARCHITECTURE
    yield _EQUAL, 1, 0, architecture.audit
    yield _RETURN, 0, 0, _KILL  # 32-bit calls have other numbers
    yield _LOAD, 0, 0, _NUMBER
    yield _AT_LEAST, 0, 1, _X32
    yield _RETURN, 0, 0, missing
    for number in sorted(denied):
        yield _EQUAL, 0, 1, number
        yield _RETURN, 0, 0, forbidden
    yield _EQUAL, 0, 1, architecture.calls["clone3"]
    yield _RETURN, 0, 0, missing  # a filter cannot read its flags; libraries then call clone
    yield from _only(architecture.calls["socket"], _FAMILIES, _FAIL | errno.EAFNOSUPPORT)
    for name, arguments in _OWN_ONLY.items():
        yield from _only_own(architecture.calls[name], arguments, forbidden)
    yield _EQUAL, 0, 3, architecture.calls["clone"]
    yield _LOAD, 0, 0, _FIRST_ARGUMENT
    yield _ANY_BIT, 0, 1, _NEW_NAMESPACES
    yield _RETURN, 0, 0, forbidden
    yield _RETURN, 0, 0, _ALLOW


def _only(number: int, arguments: Sequence[int], refusal: int) -> Iterator[Instruction]:
    """Allow the system call `number` only if its first argument is one of `arguments`."""
    yield _EQUAL, 0, 2 * len(arguments) + 2, number
    yield _LOAD, 0, 0, _FIRST_ARGUMENT
    for argument in arguments:
        yield _EQUAL, 0, 1, argument
        yield _RETURN, 0, 0, _ALLOW
    yield _RETURN, 0, 0, refusal


def _only_own(
    number: int, arguments: Sequence[tuple[int, int]], refusal: int
) -> Iterator[Instruction]:
    """Allow the system call `number` only if every (position, value) of `arguments` matches."""
    yield _EQUAL, 0, 3 * len(arguments) + 1, number
    for place, value in arguments:
        yield _LOAD, 0, 0, _FIRST_ARGUMENT + 8 * place
        yield _EQUAL, 1, 0, value
        yield _RETURN, 0, 0, refusal
    yield _RETURN, 0, 0, _ALLOW
