"""Runs a module in a process that does not outlive its parent, even one that was killed.

`python -m neurons.runtime.tied PARENT_PID MODULE [ARGUMENT...]`
"""

from __future__ import annotations

import os
import runpy
import sys

from harness.measuring.process import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    if os.getppid() != int(sys.argv[1]):  # it ended before the kernel was asked
        sys.exit(1)
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
