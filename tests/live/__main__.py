"""`python -m tests.live --subnet DIR --fork DIR ...`: the miner against the public code."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from neurons.miner.cycle import CLOSED
from neurons.runtime.errors import EX_CONFIG
from tests.live.faults import FAULTS, FaultPlan
from tests.live.miner import Miner
from tests.live.proxy import Proxy, Record
from tests.live.report import Cycle, assign, judge, read_rows, table
from tests.live.services import PublicApi, copy_public_code, make_bare, mend_api, public_validator

FAULT_NAMES = sorted({fault.name for fault in FAULTS})

HEADROOM, HEADROOM_STEP = 0.89, 0.01
"""The claim's distance from the measurements, and by how much less it is in each cycle."""

STARTS = 5
"""How often a person starts a miner that is HELD before giving the submission up."""

MOMENTS = {
    "direct": ("", "/submit_kernel"),
    "commit_reveal": ("/commit_submission", "", "/reveal_submission"),
    "auto": ("/commit_submission", "", "/submit_kernel", "/reveal_submission"),
}
"""The calls after whose success the API forgets everything or the miner dies; empty: before all."""


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    result = argparse.ArgumentParser(
        prog="python -m tests.live",
        description="Judge the miner against the public subnet's own code on loopback.",
    )
    add = result.add_argument
    add("--subnet", type=Path, required=True, help="a checkout of the public subnet")
    add("--mend-api", action="store_true", help="indent the block that keeps it from compiling")
    add("--fork", type=Path, required=True, help="a git checkout of the public fork")
    add(
        "--python",
        type=_program,
        required=True,
        help="an interpreter with tests/live/requirements.txt",
    )
    add("--miner-python", type=_program, default=sys.executable, help="one with the miner's own")
    add("--mode", nargs="+", default=["direct"], choices=sorted(MOMENTS))
    add("--cycles", type=int, default=1, help="cycles in each mode, each in a round of its own")
    add("--faults", action="store_true", help="spoil requests, wipe the API, kill the miner")
    add("--only", nargs="+", default=[], choices=FAULT_NAMES, metavar="FAULT", help="these alone")
    add("--seed", type=int, default=1, help="of the faults")
    add("--blocks", type=int, default=1, choices=range(1, 5), help="of 12 s, to the reveal")
    add("--poll", type=float, default=5.0, help="seconds between two looks of the validator")
    add("--measure-once", action="store_true", help="later cycles take the first one's figures")
    add("--target", type=int, default=2048, help="the claim's sequence length")
    add("--limit", type=float, default=900.0, help="seconds until a cycle counts as unfinished")
    add("--keep", type=Path, help="a folder for databases, journals and logs")
    return result


def _program(text: str) -> str:
    """Return a program's absolute path; its links stay, for they make a virtual environment."""
    found = shutil.which(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text} is no program")
    return str(Path(found).absolute())


def main(arguments: list[str] | None = None) -> int:
    """Run every mode and print the table; 1 when something happened that must not."""
    given = parser().parse_args(arguments)
    with ExitStack() as stack:
        folder = given.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        reports = [run_mode(mode, given, folder.absolute() / mode) for mode in given.mode]
    for text, _ in reports:
        _say(text + "\n")
    return max(status for _, status in reports)


def run_mode(mode: str, given: argparse.Namespace, folder: Path) -> tuple[str, int]:
    """Run the cycles of one mode in `folder`; return the table and the exit status."""
    folder.mkdir(parents=True)
    code = copy_public_code(given.subnet, folder / "subnet")
    mended = mend_api(code) if given.mend_api else ""
    cycles: list[Cycle] = []
    with ExitStack() as stack:
        api = PublicApi(given.python, code, folder, given.blocks)
        stack.callback(api.stop)
        api.start()
        plan = FaultPlan(given.seed, given.only) if given.faults else None
        proxy = stack.enter_context(Proxy(api.url, plan))
        validator = public_validator(given.python, code, folder, api.url, given.poll)
        stack.callback(validator.stop)
        validator.start()
        miner = _make_miner(mode, given, folder, proxy.url)
        for number in range(1, given.cycles + 1):
            cycle = _run_cycle(number, mode, given, api, proxy, miner)
            cycles.append(cycle)
            assign(miner.entries(), cycles)
            ends = ", ".join(f"{entry.id} {entry.state}" for entry in cycle.entries)
            _say(f"{mode} cycle {number}: {ends or 'nothing'}, exit status {cycle.status}")
            api.turn_round()
        rows = read_rows(api.databases, miner.hotkey)
    findings = judge(cycles, rows)
    notes = [f"Public API: {mended}.", ""] if mended else []
    return "\n".join([*notes, table(cycles, rows, findings)]), int(bool(findings))


def _make_miner(mode: str, given: argparse.Namespace, folder: Path, url: str) -> Miner:
    home = folder / "miner"
    home.mkdir()
    settings = {
        "VALIDATOR_API_URL": url,
        "SUBMISSION_MODE": mode,
        "TARGET_SEQUENCE_LENGTH": given.target,
        "FORK_UPSTREAM_URL": make_bare(given.fork, folder / "upstream.git"),
        "FORK_REMOTE": (folder / "fork.git").as_uri(),  # the miner makes it
    }
    return Miner(given.miner_python, home, settings)


def _run_cycle(
    number: int, mode: str, given: argparse.Namespace, api: PublicApi, proxy: Proxy, miner: Miner
) -> Cycle:
    """Run one cycle; in a run with faults every second one meets a wipe or a kill as well."""
    cycle = Cycle(number, mode, time.time())
    turn, kind = divmod(number, 4)
    if given.faults and kind == 0:
        _strike(cycle, MOMENTS[mode], turn, "API wiped", api.wipe, proxy)
    elif given.faults and kind == 2:
        calls = [moment for moment in MOMENTS[mode] if moment]
        _strike(cycle, calls, turn, "miner killed", miner.kill, proxy)
    # Each claim is above the last: the winner of a round is the public baseline of the next.
    headroom = HEADROOM - HEADROOM_STEP * (number % 30)
    miner.prepare(headroom, keep_measurements=given.measure_once)
    first = len(proxy.records)
    _drive(cycle, miner, given.limit)
    proxy.after = lambda _: None
    records = proxy.records[first:]
    cycle.sent = Counter(f"{r.method} {r.route} {r.status}" for r in records if r.reached)
    cycle.faults = Counter(r.fault for r in records if r.fault)
    return cycle


def _drive(cycle: Cycle, miner: Miner, seconds: float) -> None:
    """Start the miner, again after a kill or while it is HELD; what stays open is abandoned."""
    for cycle.starts in range(1, STARTS + 1):
        cycle.status = miner.run("once", seconds)
        if all(entry.state in CLOSED for entry in miner.entries()):
            return
        if cycle.status in (None, EX_CONFIG):
            break
    miner.run("abandon", seconds)


def _strike(
    cycle: Cycle,
    moments: Sequence[str],
    turn: int,
    name: str,
    act: Callable[[], None],
    proxy: Proxy,
) -> None:
    """Act now, or once the API has carried out a call of this turn's moment."""
    route = moments[turn % len(moments)]
    if not route:
        cycle.trouble = f"{name} before it"
        act()
        return

    def after(record: Record) -> None:
        if record.route == route and record.status == 200 and not cycle.trouble:
            cycle.trouble = f"{name} after {route}"
            act()

    proxy.after = after


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the children are ended
    sys.exit(main())
