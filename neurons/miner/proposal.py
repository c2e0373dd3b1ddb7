"""A proposal: an overlay that a command has changed, and the rules that it must keep."""

from __future__ import annotations

import shlex
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.measuring.process import run_supervised
from harness.measuring.runner import child_environment
from neurons.runtime.loading import environment
from quasar_kernels.contract import (
    QUASAR_DIR,
    Scope,
    check_tree,
    compiled_files,
    overlay_digest,
    overlay_files,
)

FILE_BYTES, ALL_BYTES = 2**21, 2**24
"""Limits in bytes on one file of a proposal, and on all its files together."""


class Rejected(Exception):
    """A proposal is not accepted; the message has the reason, as a sentence."""


def propose(
    command: Sequence[str],
    overlay: Path,
    *,
    variables: Mapping[str, str],
    device: str,
    seconds: float,
    stop: threading.Event,
) -> None:
    """Run a command in the folder `overlay`, a copy of the kernels that the command changes.

    Its environment has `variables` and no secrets. Its process group is killed after `seconds` or
    when `stop` is set. Raises Rejected if it fails.
    """
    text = shlex.join(command)
    try:
        ended = run_supervised(
            list(command),
            message=lambda _result_fd: b"",
            env={**child_environment(environment(), device=device), **variables},
            cwd=overlay,
            timeout=seconds,
            stop=stop,
        )
    except OSError as error:
        raise Rejected(f"{text} cannot be started: {error.strerror}.") from error
    if ended.stopped:
        raise Rejected(f"{text} was stopped.")
    if ended.timed_out:
        raise Rejected(f"{text} was not done within {seconds:g} s.")
    if ended.returncode:
        words = " ".join(ended.log_tail.split())[-300:]
        raise Rejected(f"{text} ended with status {ended.returncode}: {words or 'no output'}.")


def check_files(overlay: Path, present: Path, scope: Scope) -> None:
    """Raise Rejected if nothing changed, or for a link, a misplaced file or too many bytes."""
    total, known = 0, set(map(Path, overlay_files(root=present)))
    for path in sorted(overlay.rglob("*")):
        name = path.relative_to(overlay)
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise Rejected(f"{name} is not a regular file.")
        if path.is_dir() or "__pycache__" in name.parts or path.suffix == ".pyc":
            continue
        if name not in known and Path(QUASAR_DIR) not in name.parents:
            raise Rejected(f"{name} is outside {QUASAR_DIR}.")
        size = path.stat().st_size
        total += size
        if size > FILE_BYTES or total > ALL_BYTES:
            raise Rejected(f"{name} makes the kernels too long: {size:,} of {total:,} bytes.")
    if overlay_digest(scope, overlay) == overlay_digest(scope, present):
        raise Rejected("The command changed no published file.")


def copy_fork(fork: Path, present: Path, overlay: Path, scope: Scope, tree: Path) -> None:
    """Make `tree` a copy of the worktree `fork` with `overlay` in place of `present`.

    Raises Rejected if the copy breaks a rule of the subnet.
    """
    skipped = shutil.ignore_patterns("__pycache__", ".git")
    shutil.copytree(fork / "fla", tree / "fla", ignore=skipped)
    for name in overlay_files(scope, present):
        (tree / name).unlink(missing_ok=True)
    for name in overlay_files(scope, overlay):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(overlay / name, tree / name)
    broken = [f"{name}: The file is compiled code." for name in compiled_files(tree)]
    broken += map(str, check_tree(tree))
    if broken:
        raise Rejected(f"It breaks the rules: {broken[0]}")
