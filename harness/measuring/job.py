"""The messages between the runner and a worker: a job on stdin, a reply on a private descriptor."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

from pydantic import Field, JsonValue

from harness.hardware.machine import Frozen
from harness.sample import Kind


class Exit(IntEnum):
    """Exit status of a worker; the runner ignores it if the worker has sent a reply."""

    DONE = 0
    BAD_JOB = 2
    PARENT_GONE = 3
    CRASH = 5


class Job(Frozen):
    """A worker's task.

    - `check` runs the tree's correctness check.
    - `time` runs the validator's loop at `length` tokens, and with `cross_check` a chain of calls
      after it.
    - `prove` measures the speed of untrusted code by the referee's clock.
    - `import` imports the tree, `probe` describes the machine, `call` calls `function`
      (`module:name`) with `arguments`.

    Processes that share the file `gpu_lock` import at the same time and are timed one after
    another. Each ends itself after `seconds`, not counting the wait for the lock. The reply repeats
    `nonce`, so that the code under test cannot forge a reply. `parent` is the pid of the starting
    process.
    """

    task: Literal["check", "time", "prove", "import", "probe", "call"]
    tree: str | None = None
    length: int = Field(default=1, gt=0)
    device: Literal["auto", "cuda", "cpu"] = "auto"
    source_digest: str = ""
    own: bool = Field(default=True, description="whether the tree is one's own, not a stranger's")
    cross_check: bool = True
    cache: Literal["shared", "cold"] = "shared"
    gpu_lock: str | None = None
    seconds: float | None = Field(default=None, description="of a process with a GPU lock")
    function: str = ""
    arguments: tuple[JsonValue, ...] = ()
    result_fd: int = Field(gt=2)
    nonce: str
    parent: int


class Reply(Frozen):
    """A worker's reply: a `body` for its task, or a failure."""

    nonce: str
    failure: Kind | None = None
    reason: str = ""
    body: dict[str, JsonValue] | None = None
