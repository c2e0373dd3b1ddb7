"""The messages between the runner and a worker: a job on stdin, a reply on a private descriptor."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

from pydantic import Field, JsonValue

from harness.report import Frozen, Kind


class Exit(IntEnum):
    """Exit status of a worker. Only the reply counts; the status serves who reads a log."""

    DONE = 0
    BAD_JOB = 2
    PARENT_GONE = 3
    OUT_OF_MEMORY = 4
    CRASH = 5
    GATE = 6
    IMPORT = 7


class Job(Frozen):
    """What a worker has to do.

    `gate` checks the tree's correctness, `time` runs the validator's loop at `length` tokens,
    `prove` takes the speed of a stranger's tree by the worker's own clock, `import` only imports
    the tree, `probe` only describes the machine, `call` only calls `function` (`module:name`) with
    `arguments`. `checked` makes `time` prove a row of calls after the loop, too. Processes that
    share the file `turn` import side by side and are timed one after another; each ends itself
    after `seconds`, in which waiting for its turn does not count.
    `nonce` comes back in the reply, so that output forged by the code under test is not taken
    for one. `parent` is the pid of the starting process.
    """

    task: Literal["gate", "time", "prove", "import", "probe", "call"]
    tree: str | None = None
    length: int = Field(default=1, gt=0)
    device: Literal["auto", "cuda", "cpu"] = "auto"
    source_digest: str = ""
    checked: bool = True
    turn: str | None = None
    seconds: float | None = Field(default=None, description="of a process that shares a turn")
    function: str = ""
    arguments: tuple[JsonValue, ...] = ()
    result_fd: int = Field(gt=2)
    nonce: str
    parent: int


class Reply(Frozen):
    """What a worker answers: a `body` for its task, or a failure with its remedy."""

    nonce: str
    failure: Kind | None = None
    reason: str = ""
    remedy: str = ""
    body: dict[str, JsonValue] | None = None


class ProfileRow(Frozen):
    """One operation or kernel of a call: its own time in milliseconds, and its share of all."""

    name: str
    calls: float
    ms: float
    share: float


class Profile(Frozen):
    """Where the time of a call goes, the longest first; kernels where there is a GPU."""

    device: Literal["cuda", "cpu"]
    rows: tuple[ProfileRow, ...]
