"""`python -m tests.live --subnet DIR --fork DIR ...`: runs the miner against the public code."""

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
"""CLAIM_HEADROOM, and its reduction in each cycle."""

STARTS = 5
"""Most starts of a miner that is HELD before its submission is abandoned."""

MOMENTS = {
    "direct": ("", "/submit_kernel"),
    "commit_reveal": ("/commit_submission", "", "/reveal_submission"),
    "auto": ("/commit_submission", "", "/submit_kernel", "/reveal_submission"),
}
"""The calls after which the API's database is emptied or the miner killed; "": before all calls."""


def parser() -> argparse.ArgumentParser:
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
    add("--mode", nargs="+", default=["direct"], choices=sorted(MOMENTS))
    add("--cycles", type=int, default=1, help="cycles in each mode, each in its own round")
    add(
        "--faults",
        action="store_true",
        help="disturb requests, empty the API's database, kill the miner",
    )
    add(
        "--only",
        nargs="+",
        default=[],
        choices=FAULT_NAMES,
        metavar="FAULT",
        help="use only these faults",
    )
    add("--seed", type=int, default=1, help="of the faults")
    add("--blocks", type=int, default=1, choices=range(1, 5), help="of 12 s, to the reveal")
    add("--poll", type=float, default=5.0, help="seconds between the validator's polls")
    add("--measure-once", action="store_true", help="later cycles use the first one's measurements")
    add("--target", type=int, default=2048, help="the claim's sequence length")
    add("--limit", type=float, default=900.0, help="seconds until a cycle counts as unfinished")
    add("--keep", type=Path, help="a folder for databases, journals and logs")
    return result


def _program(text: str) -> str:
    """Return a program's absolute path; links are kept, because virtual environments need them."""
    path = shutil.which(text)
    if path is None:
        raise argparse.ArgumentTypeError(f"{text} is not a program")
    return str(Path(path).absolute())


def main(arguments: list[str] | None = None) -> int:
    """Run every mode and print the reports; return 1 if there are findings."""
    options = parser().parse_args(arguments)
    with ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        reports = [run_mode(mode, options, folder.absolute() / mode) for mode in options.mode]
    for text, _ in reports:
        _print(text + "\n")
    return max(status for _, status in reports)


def run_mode(mode: str, options: argparse.Namespace, folder: Path) -> tuple[str, int]:
    """Run the cycles of one mode in `folder`; return the report and the exit status."""
    folder.mkdir(parents=True)
    code = copy_public_code(options.subnet, folder / "subnet")
    repair = mend_api(code) if options.mend_api else ""
    cycles: list[Cycle] = []
    with ExitStack() as stack:
        api = PublicApi(options.python, code, folder, options.blocks)
        stack.callback(api.stop)
        api.start()
        plan = FaultPlan(options.seed, options.only) if options.faults else None
        proxy = stack.enter_context(Proxy(api.url, plan))
        validator = public_validator(options.python, code, folder, api.url, options.poll)
        stack.callback(validator.stop)
        validator.start()
        miner = _make_miner(mode, options, folder, proxy.url)
        for number in range(1, options.cycles + 1):
            cycle = _run_cycle(number, mode, options, api, proxy, miner)
            cycles.append(cycle)
            assign(miner.entries(), cycles)
            ends = ", ".join(f"{entry.id} {entry.state}" for entry in cycle.entries)
            _print(f"{mode} cycle {number}: {ends or 'nothing'}, exit status {cycle.status}")
            api.turn_round()
        rows = read_rows(api.databases, miner.hotkey)
    findings = judge(cycles, rows)
    notes = [f"Public API: {repair}.", ""] if repair else []
    return "\n".join([*notes, table(cycles, rows, findings)]), int(bool(findings))


def _make_miner(mode: str, options: argparse.Namespace, folder: Path, url: str) -> Miner:
    home = folder / "miner"
    home.mkdir()
    settings = {
        "VALIDATOR_API_URL": url,
        "SUBMISSION_MODE": mode,
        "TARGET_SEQUENCE_LENGTH": options.target,
        "FORK_UPSTREAM_URL": make_bare(options.fork, folder / "upstream.git"),
        "FORK_REMOTE": (folder / "fork.git").as_uri(),  # the miner makes it
    }
    return Miner(home, settings)


def _run_cycle(
    number: int, mode: str, options: argparse.Namespace, api: PublicApi, proxy: Proxy, miner: Miner
) -> Cycle:
    """Run one cycle; with faults, every second one also meets a wipe or a kill."""
    cycle = Cycle(number, mode, time.time())
    turn, kind = divmod(number, 4)
    if options.faults and kind == 0:
        _strike(cycle, MOMENTS[mode], turn, "API wiped", api.wipe, proxy)
    elif options.faults and kind == 2:
        calls = [moment for moment in MOMENTS[mode] if moment]
        _strike(cycle, calls, turn, "miner killed", miner.kill, proxy)
    # Each claim must exceed the last, because a round's winner is the next round's baseline.
    headroom = HEADROOM - HEADROOM_STEP * (number % 30)
    miner.prepare(headroom, keep_measurements=options.measure_once)
    first = len(proxy.records)
    _drive(cycle, miner, options.limit)
    proxy.after = lambda _: None
    records = proxy.records[first:]
    cycle.sent = Counter(f"{r.method} {r.route} {r.status}" for r in records if r.replied)
    cycle.faults = Counter(r.fault for r in records if r.fault)
    return cycle


def _drive(cycle: Cycle, miner: Miner, seconds: float) -> None:
    """Run the miner until its submissions are closed; after STARTS attempts, abandon them."""
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
    """Call `act` now, or after the API has processed the call that this turn names."""
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


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the children are ended
    sys.exit(main())
