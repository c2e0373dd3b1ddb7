"""The referee's side of the subject: another process, behind a channel; its replies are untrusted.

The two share stdout, stderr and the channel, but no memory. The subject cannot read the referee's
memory. Where Linux has Landlock's scopes, it cannot signal the referee either. `proof.py` measures
the speed of untrusted code by the referee's clock.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.measuring.errors import without_result
from harness.measuring.job import Exit
from harness.measuring.process import die_with_parent, hide
from harness.sample import Kind
from harness.worker.failures import WorkerError
from harness.worker.subject.confine import give_up_privileges
from harness.worker.subject.serve import serve
from harness.worker.wire import Channel, WireError

_SPARE = 64 << 20
"""Bytes that a reply may have in addition to eight times the largest tensor sent."""

_GRACE = 2.0
"""Seconds for the end of a subject that has closed its channel."""

_KINDS: tuple[Kind, ...] = ("gate", "import", "crash", "out_of_memory")


def fork_subject() -> SubjectProxy:
    """Fork the subject from this process, which has imported torch and holds no secret yet.

    Call this before the job is read, CUDA is initialised or a thread is started.
    """
    ours, theirs = socket.socketpair()
    hide()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _become_subject(parent, theirs)
        finally:  # never returns to the referee's code or runs exit handlers
            os._exit(Exit.CRASH)
    theirs.close()
    return SubjectProxy(Channel(ours), pid)


def _become_subject(parent: int, end: socket.socket) -> None:
    die_with_parent()
    if os.getppid() != parent:
        os._exit(Exit.PARENT_GONE)
    keep = end.fileno()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.closerange(3, keep)
    os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
    hide(hidden=False)
    give_up_privileges()
    serve(Channel(end))


class SubjectProxy:
    """The code under test, in the process `pid` at the other end of `channel`."""

    def __init__(self, channel: Channel, pid: int) -> None:
        self._channel, self._pid = channel, pid
        self._sent = 0  # bytes of the largest tensor so far, which limits the size of replies

    def ask(
        self, op: str, tensors: Mapping[str, Tensor] | None = None, **fields: Any
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Request an operation; return the reply: JSON values and tensors on the CPU.

        Raises a WorkerError if the subject failed, ended or does not keep to the protocol.
        """
        for tensor in (tensors or {}).values():
            self._sent = max(self._sent, tensor.numel() * tensor.element_size())
        try:
            self._channel.send({"op": op, **fields}, tensors)
            body, contents = self._channel.receive(8 * self._sent + _SPARE)
        except WireError as error:
            if error.gone:
                raise self._ended() from None
            raise WorkerError(f"the worker's answer is malformed: {error}", "protocol") from None
        except OSError:
            raise self._ended() from None
        failure = body.get("failure")
        if isinstance(failure, dict):
            raise _failure_of(failure)
        return body, contents

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        self.ask("put", tensors)

    def draw(self, name: str, shape: Sequence[int], seed: int) -> None:
        self._sent = max(self._sent, 4 * math.prod(shape))
        self.ask("draw", name=name, shape=list(shape), seed=seed)

    def fetch(self, names: Sequence[str], rows: Sequence[int] | None = None) -> dict[str, Tensor]:
        return self.ask("fetch", names=names, rows=rows)[1]

    def operate(self, *, initial: bool = False, final: bool = False) -> dict[str, Tensor]:
        return self.ask("operate", initial=initial, final=final)[1]

    def build(self) -> dict[str, Tensor]:
        return self.ask("build")[1]

    def weights(self) -> dict[str, Tensor]:
        return self.ask("weights")[1]

    def forward(self) -> dict[str, Tensor]:
        return self.ask("forward")[1]

    def gradients(self) -> dict[str, Tensor]:
        return self.ask("gradients")[1]

    def tampered(self) -> dict[str, Any]:
        return self.ask("tampered")[0]

    def end(self) -> None:
        """End the process; its memory, on the GPU too, is free afterwards."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0

    def _ended(self) -> WorkerError:
        deadline = time.monotonic() + _GRACE
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        while not pid and time.monotonic() < deadline:
            time.sleep(0.01)
            pid, status = os.waitpid(self._pid, os.WNOHANG)
        if not pid:
            self.end()
            return WorkerError("the code under test closed the referee's channel", "protocol")
        self._pid = 0
        return WorkerError(*without_result(os.waitstatus_to_exitcode(status)))


def _failure_of(failure: dict[str, Any]) -> WorkerError:
    kind: Kind = next((kind for kind in _KINDS if kind == failure.get("kind")), "protocol")
    return WorkerError(str(failure.get("reason", ""))[:2000], kind)


def device_of(name: str) -> torch.device:
    """Return the device of `cuda`, `cpu` or `auto`; raise a WorkerError for a missing one."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise WorkerError("no CUDA device is visible to torch; use --device cpu", "crash")
    return torch.device("cuda" if available and name != "cpu" else "cpu")
