"""The faults that the miner must survive, a row each, and the tests that inject them.

`python -m tests.faults.table` writes the table of docs/reliability.md. A test belongs to row 4 when
its name begins with `test_row_04_`, wherever it lies.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests import PROJECT

PAGE = PROJECT / "docs/reliability.md"
BEGIN, END = "<!-- rows -->\n", "<!-- /rows -->\n"

ROWS = (
    ("kill -9 at every journal boundary", "the restart resumes; one commit, one reveal"),
    ("random interleavings of faults and crashes", "a reveal matches its commit; one lives"),
    ("a commit's reply is lost; 409", "found in the pending list; no new salt"),
    ("a reveal too early (425)", "waits on the server's block, then once more"),
    ("a reveal repeated (409)", "done, no error"),
    ("a reveal refused (400)", "HELD, not one retry"),
    ("429, 503, 500, reset, DNS, refused, timeouts", "honoured, capped, jittered; one line each"),
    ("401, 403, 404", "HELD with the remedy; registration tried where it is the remedy"),
    ("no active round", "asked for, then once more"),
    ("malformed, huge, wrong-typed replies", "one clear protocol error, a bounded read"),
    ("bad TLS, http, a redirect", "refused; headers not sent again"),
    ("a clock that is off or jumps back", "monotonic waits; a warning"),
    ("a restart long after the reveal block", "one reveal, then a new cycle"),
    ("a second instance", "exit 78 naming the first's pid; no stale lock"),
    ("SIGINT, SIGTERM, SIGHUP; pm2, screen", "exit 0 within 10 s, no child left"),
    ("the daemon killed while a worker measures", "the worker dies too"),
    ("a full disk", "pause, no half-written file, resumes"),
    ("a corrupt, newer or older journal", "kept and said; older ones migrate"),
    ("a torn report", "measured again"),
    ("a worker that hangs or forks", "its group is killed at the deadline"),
    ("a worker that forges or floods", "the private descriptor alone counts"),
    ("out of memory", "that length is not claimed; shorter ones stay"),
    ("sticky CUDA errors, no NVML", "no claim from partial data; HELD after a few"),
    ("throttling, others on the GPU, ECC errors", "dropped, cooled, retried, refused"),
    ("noisy, NaN, zero, negative timings", "the claim is the accepted minimum at most"),
    ("cheating kernels", "the gate rejects each"),
    ("the fork moved", "checked before the reveal; no force push"),
    ("push rejected, token expired, rate limits", "HELD naming the scope; no token shown"),
    ("a hostile repository", "its programs and links do nothing"),
    ("canary secrets through whole cycles", "in no log, report or output"),
    (".env missing, CRLF, `$(...)`, readable by others", "every error at once; nothing evaluated"),
    ("hotkey missing or encrypted; a coldkey here", "exit 78 with the command to run"),
    ("a month", "flat memory and descriptors; bounded files"),
    ("a fork that is made slowly", "polled with backoff"),
    ("five failed validations would ban", "stops at three, saying why"),
)


def by_row() -> dict[int, list[str]]:
    """Return the tests of every row as `file::name`, sorted."""
    found: dict[int, list[str]] = {row: [] for row in range(1, len(ROWS) + 1)}
    for file in sorted((PROJECT / "tests").rglob("test_*.py")):
        for row, name in re.findall(r"^def (?=test_row_(\d\d)_)(\w+)", file.read_text(), re.M):
            found[int(row)].append(f"{file.relative_to(PROJECT / 'tests')}::{name}")
    return found


def render() -> str:
    """Return the table in Markdown."""
    lines = ["| row | fault | what is expected | tests |", "|---:|---|---|---|"]
    for row, tests in by_row().items():
        files = sorted({f"`{one.partition('::')[0]}`" for one in tests})
        fault, expected = ROWS[row - 1]
        lines.append(f"| {row:02} | {fault} | {expected} | {', '.join(files)} |")
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """Return the page with its table made anew."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + render() + END + rest.partition(END)[2]


if __name__ == "__main__":
    Path(PAGE).write_text(written(PAGE.read_text()))
