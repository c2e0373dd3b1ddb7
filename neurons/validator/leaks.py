"""Tests a sandbox: tries forbidden operations inside it, and reports those that succeed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from neurons.validator.seccomp import this_architecture

_NAMESPACES = ("ipc", "mnt", "net", "pid", "uts")

_PROBE = """
import json, os, sys
secret, port, calls, *outside = json.loads(sys.argv[1])
leaks = []
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
wanted = {
    "unshare": (0x10000000, "user namespaces"),
    "keyctl": (0, "kernel keyrings"),
    "io_uring_setup": (1, "io_uring"),
    "bpf": (0, "bpf"),
    "perf_event_open": (0, "perf"),
}
if not calls:
    leaks.append("system calls of " + os.uname().machine + " cannot be filtered")
for name, (argument, what) in wanted.items():
    arguments = [ctypes.c_long(number) for number in (calls.get(name, -1), argument, -4, 0, 0, 0)]
    if name in calls and libc.syscall(*arguments) < 0 and ctypes.get_errno() in (1, 38):
        continue
    if name in calls:
        leaks.append("it may use " + what)
import socket
try:
    socket.socket(40, socket.SOCK_STREAM).close()  # AF_VSOCK
    leaks.append("it may reach this machine's hypervisor")
except OSError:
    pass
for kind, name in outside:
    if os.readlink("/proc/self/ns/" + kind) == name:
        leaks.append("it shares this machine's " + kind + " namespace")
if os.path.lexists(secret):
    leaks.append("it sees this user's files")
if not os.statvfs("/usr").f_flag & os.ST_RDONLY or os.access("/usr", os.W_OK):
    leaks.append("it may write to the system")
try:
    socket.create_connection(("127.0.0.1", port), 2).close()
    leaks.append("it reaches this machine's network")
except OSError:
    pass
if "CapEff:\\t0000000000000000" not in open("/proc/self/status").read():
    leaks.append("it has capabilities")
print(json.dumps(leaks))
"""


def find_leaks(confine: Callable[[list[str], Path], list[str]]) -> list[str]:
    """Return the leaks, as sentences, of the sandbox that `confine` puts a command into."""
    with tempfile.TemporaryDirectory(prefix="sandbox-") as name, socket.socket() as listener:
        folder = Path(name)
        secret, inside = folder / "secret", folder / "inside"
        secret.touch(0o600)
        inside.mkdir()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        outside = [(kind, os.readlink(f"/proc/self/ns/{kind}")) for kind in _NAMESPACES]
        known = this_architecture()
        calls = known.calls if known else {}
        argument = json.dumps([str(secret), listener.getsockname()[1], calls, *outside])
        argv = [sys.executable, "-I", "-S", "-c", _PROBE, argument]
        done = subprocess.run(
            confine(argv, inside),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    try:
        return list(json.loads(done.stdout))
    except ValueError:
        reason = " ".join(done.stderr.split()) or f"it ended with status {done.returncode}"
        return [f"nothing can be started in it: {reason[:300]}"]
