"""Confinement of the subject, without privileges, to isolate it from the referee."""

from __future__ import annotations

import ctypes
import os
import platform

_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITIES = (16, 17, 19, 21, 25, 38, 39)
"""SYS_MODULE, SYS_RAWIO, SYS_PTRACE, SYS_ADMIN, PERFMON and BPF, which give access to other
processes, and SYS_TIME, which can slow the monotonic clock down by up to a tenth."""
_CAPABILITY_VERSION = 0x20080522
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_RULE_PATH_BENEATH = 1
_SCOPES_SINCE = 6  # Landlock's ABI
_SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11
_REFER_SINCE = 2
_ACCESS_REFER = 1 << 13


def give_up_privileges() -> None:
    """Restrict this process and its descendants: they can trace and signal only each other.

    Root can no longer trace other processes. A Landlock domain (Linux 5.19) closes /proc/PID of
    the same user's other processes; it blocks signals to them only from Linux 6.12 on.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _drop_capabilities(libc)
    version = landlock_version()
    if version >= _REFER_SINCE:
        _enter_domain(libc, version)


def landlock_version() -> int:
    """Return the ABI version of this Linux's Landlock; less than 1 if there is none."""
    if platform.machine() not in {"x86_64", "aarch64"}:  # the call numbers are for these two
        return 0
    return int(ctypes.CDLL(None).syscall(_LANDLOCK_CREATE_RULESET, None, 0, 1))


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; the lower 32 bits first
    known = libc.capget(header, sets) == 0
    for capability in _CAPABILITIES:
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
        for kind in range(3):
            sets[capability // 32 * 3 + kind] &= ~(1 << capability % 32)
    if known:
        libc.capset(header, sets)


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def _enter_domain(libc: ctypes.CDLL, version: int) -> None:
    """Enter a Landlock domain that restricts no file access.

    Since ABI 6, scopes are enough for a domain. Before that, a domain must restrict some file
    access: renaming to another folder can be restricted and then allowed everywhere by a rule.
    ABI 1 forbids such renames in every domain, which would break Triton's cache.
    """
    scoped = version >= _SCOPES_SINCE
    # file system, network (ABI 4), scopes (ABI 6); older Linux accepts only zeros there
    rules = (ctypes.c_uint64 * 3)(0, 0, _SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS)
    if not scoped:
        rules[:] = [_ACCESS_REFER, 0, 0]
    size = ctypes.c_size_t(ctypes.sizeof(rules) if scoped else ctypes.sizeof(ctypes.c_uint64))
    ruleset = libc.syscall(_LANDLOCK_CREATE_RULESET, ctypes.byref(rules), size, 0)
    if ruleset < 0:
        return
    try:
        if scoped or _allow_renames(libc, ruleset):
            libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow_renames(libc: ctypes.CDLL, ruleset: int) -> bool:
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    try:
        rule = ctypes.byref(_PathBeneath(_ACCESS_REFER, root))
        return bool(libc.syscall(_LANDLOCK_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0) == 0)
    finally:
        os.close(root)
