"""Runs a module in a process that does not outlive its parent, even one that was killed.

`python -m neurons.tied PARENT_PID MODULE [ARGUMENT...]`
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def tie_to_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends (Linux only).

    Raises:
        SystemExit: the parent has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel knew
        sys.exit(1)


if __name__ == "__main__":
    tie_to_parent(int(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
