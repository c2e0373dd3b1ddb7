"""What a process without privileges can do to keep the code under test away from its judge."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys

_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITIES = (16, 17, 19, 21, 38, 39)
"""SYS_MODULE, SYS_RAWIO, SYS_PTRACE, SYS_ADMIN, PERFMON and BPF, which let look into others."""
_CAPABILITY_VERSION = 0x20080522
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446
_SCOPES_SINCE = 6  # Landlock's ABI
_SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11
_ACCESS_MAKE_BLOCK = 1 << 11


def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def give_up_privileges() -> None:
    """Let this process and its descendants trace nothing but themselves, and signal nothing else.

    Root loses the right to trace others. A Landlock domain (Linux 5.13) closes /proc/PID of other
    processes of the same user; its scope for signals needs Linux 6.12.
    """
    libc = _libc()
    if libc is None:
        return
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _drop_capabilities(libc)
    version = landlock_version()
    if version >= 1:
        _enter_domain(libc, version)


def landlock_version() -> int:
    """Return the ABI version of this Linux's Landlock; less than 1 where there is none."""
    libc = _libc() if platform.machine() in {"x86_64", "aarch64"} else None  # one call's number
    return 0 if libc is None else int(libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, 1))


def signals_are_scoped() -> bool:
    """Tell whether this Linux can keep a process from signalling others."""
    return landlock_version() >= _SCOPES_SINCE


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; first the lower 32 of each
    known = libc.capget(header, sets) == 0
    for capability in _CAPABILITIES:
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
        for kind in range(3):
            sets[capability // 32 * 3 + kind] &= ~(1 << capability % 32)
    if known:
        libc.capset(header, sets)


def _enter_domain(libc: ctypes.CDLL, version: int) -> None:
    """Enter a Landlock domain, in which only block devices cannot be made, if nothing else."""
    scopes = _SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS if version >= _SCOPES_SINCE else 0
    # file system, network since 4, scopes since 6: an older Linux refuses fields that are not 0
    rules = (ctypes.c_uint64 * 3)(_ACCESS_MAKE_BLOCK, 0, scopes)
    size = ctypes.c_size_t(ctypes.sizeof(rules) if scopes else ctypes.sizeof(ctypes.c_uint64))
    ruleset = libc.syscall(_LANDLOCK_CREATE_RULESET, ctypes.byref(rules), size, 0)
    if ruleset >= 0:
        libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0)
        with contextlib.suppress(OSError):
            os.close(ruleset)
