"""The validator's systemd unit leaves the sandbox of forks what it needs.

systemd does not run in tests. Seccomp filters and mounts like systemd's (systemd.exec(5)) emulate
the settings that can prevent namespaces, a host name or a new /proc.
"""

import errno
import os
import platform
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from neurons.validator.packages import Packages
from neurons.validator.sandbox import USER, Sandbox
from neurons.validator.seccomp import INSTALL
from tests import PROJECT
from tests.processes import HANG, run

NEW_NAMESPACES = 0x7E020080  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
CLONE, SETHOSTNAME, UNSHARE, CLONE3 = 56, 170, 272, 435  # system calls of x86-64
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06  # BPF instructions
ALLOW, REFUSE, NUMBER, FIRST_ARGUMENT = 0x7FFF0000, 0x00050000, 0, 16

MOUNTS = {
    "ProtectKernelTunables": "mount --bind /proc/sys /proc/sys",
    "ProtectKernelLogs": "mount --bind /dev/null /proc/kmsg",
    "ProtectProc": "mount -t proc -o hidepid=2 proc /proc",
    "ProtectControlGroups": "mount --bind /sys/fs/cgroup /sys/fs/cgroup",
}


def settings(text: str) -> dict[str, str]:
    """Return a unit's settings; of several with one name, the last."""
    lines = (line.partition("=") for line in text.splitlines() if not line.startswith("#"))
    return {name: value for name, _, value in lines}


def refusing(number: int, flags: int = 0, error: int = errno.EPERM) -> bytes:
    """Return BPF that refuses a system call, or only its calls with one of `flags`."""
    refuse = (RETURN, 0, 0, REFUSE | error)
    body = [refuse]
    if flags:
        body = [(LOAD, 0, 0, FIRST_ARGUMENT), (ANY_BIT, 0, 1, flags), refuse]
    words = [(LOAD, 0, 0, NUMBER), (EQUAL, 0, len(body), number), *body]
    return b"".join(struct.pack("HBBI", *word) for word in words)


def emulated(unit: dict[str, str], command: list[str]) -> list[str]:
    """Return `command` as a user's under a unit's settings."""
    program = b""
    if unit.get("RestrictNamespaces") == "yes":
        program += refusing(CLONE3, error=errno.ENOSYS)
        program += refusing(CLONE, NEW_NAMESPACES) + refusing(UNSHARE, NEW_NAMESPACES)
    if unit.get("ProtectHostname") == "yes":
        program += refusing(SETHOSTNAME)
    program += struct.pack("HBBI", RETURN, 0, 0, ALLOW)
    order = sorted(MOUNTS, key=lambda name: name != "ProtectProc")  # the others mount below it
    mounts = [MOUNTS[name] for name in order if unit.get(name) in ("yes", "invisible")]
    user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs"]
    user += ["--bounding-set=-all", "/usr/bin/python3", "-I", "-S", "-c", INSTALL, program.hex()]
    script = " && ".join([*mounts, 'exec "$@"'])
    return ["unshare", "--mount", "sh", "-c", script, "sh", *user, *command]


def start(unit: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Return status and output of a command in the sandbox of a validator under `unit`."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: USER)
        patch.setattr(sys, "executable", "/usr/bin/python3")  # every user can read it
        sandbox = Sandbox("bwrap", 2**30, packages=Packages())
        command = sandbox.command(["hostname"], {}, folder, [])
    done = run(*emulated(unit, command))
    return done.returncode, done.stdout + done.stderr


can_emulate = pytest.mark.skipif(
    os.geteuid() != 0
    or platform.machine() != "x86_64"
    or any(shutil.which(name) is None for name in ("bwrap", "/usr/bin/python3"))
    or subprocess.run(
        emulated({}, ["unshare", "--user", "true"]), capture_output=True, timeout=HANG, check=False
    ).returncode
    != 0,
    reason="needs root on x86-64, bubblewrap and namespaces of users",
)


@can_emulate
def test_a_fork_starts_under_the_validators_unit(tmp_path, monkeypatch):
    text = (PROJECT / "scripts/systemd/quasar-validator.service").read_text()
    assert start(settings(text), tmp_path, monkeypatch) == (0, "sandbox\n")


@can_emulate
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("RestrictNamespaces", "amespace"),
        ("ProtectHostname", "hostname"),
        ("ProtectKernelTunables", "mount proc"),
        ("ProtectKernelLogs", "mount proc"),
    ],
)
def test_each_setting_that_the_unit_lacks_prevents_sandboxes(name, reason, tmp_path, monkeypatch):
    status, output = start({name: "yes"}, tmp_path, monkeypatch)
    assert status != 0
    assert output.startswith("bwrap: ")
    assert reason in output
