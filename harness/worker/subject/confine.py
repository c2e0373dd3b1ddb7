"""What a process without privileges can do to keep the code under test away from its judge."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys

_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITIES = (16, 17, 19, 21, 38, 39)
"""SYS_MODULE, SYS_RAWIO, SYS_PTRACE, SYS_ADMIN, PERFMON and BPF, which let look into others."""
_CAPABILITY_VERSION = 0x20080522
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446
_SCOPES_SINCE = 6  # Landlock's ABI
_SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11


def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def hide() -> None:
    """Close this process's memory, descriptors and environment to others of its user (Linux)."""
    libc = _libc()
    if libc is not None:
        libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def show() -> None:
    """Undo `hide`, which a forked process inherits: it has to see its own descriptors."""
    libc = _libc()
    if libc is not None:
        libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def give_up_privileges() -> None:
    """Let this process and its descendants neither trace nor signal anything but themselves.

    Root loses the right to trace others, for which a process of the same user that `hide` closed,
    or that has that right, stays closed then. Signals to others need Landlock of Linux 6.12;
    where that is not there, they still go through.
    """
    libc = _libc()
    if libc is None:
        return
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _drop_capabilities(libc)
    if signals_are_scoped():
        _scope_signals(libc)


def signals_are_scoped() -> bool:
    """Tell whether this Linux can keep a process from signalling others."""
    libc = _libc() if platform.machine() in {"x86_64", "aarch64"} else None  # one call's number
    version = 0 if libc is None else libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, 1)
    return int(version) >= _SCOPES_SINCE


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


def _scope_signals(libc: ctypes.CDLL) -> None:
    rules = (ctypes.c_uint64 * 3)(0, 0, _SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS)
    size = ctypes.c_size_t(ctypes.sizeof(rules))
    ruleset = libc.syscall(_LANDLOCK_CREATE_RULESET, ctypes.byref(rules), size, 0)
    if ruleset >= 0:
        libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0)
        with contextlib.suppress(OSError):
            os.close(ruleset)
