"""Judge a fork as the validator does, before it is submitted; nothing is sent anywhere.

    python scripts/local_validator.py FORK --claim TOKENS_PER_SEC [--target LENGTH] [--commit HASH]
    python scripts/local_validator.py --repo-path DIR [--seq-len LENGTH] [--full]

FORK is an https address or a folder. The script clones the fork into an empty folder, checks its
rules, times it at the validator's lengths and at the target, and compares its speed with the claim.
The fork's code runs in the validator's sandbox if one works, otherwise with your rights, after a
warning.
DIR is a checkout, or an overlay such as quasar_kernels/overlay, which the script judges without a
claim: rules, import, correctness and speed; by default, it is quasar_work/flash-linear-attention.
--full uses the validator's lengths and the target.
Exit status 0: it passes; 1: a validator would reject it, or there is no verdict; 130: a signal
stopped the script. The verdict is UNDECIDED if a busy machine did not time it within the limit.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from datetime import datetime, timezone
from pathlib import Path

from harness.measuring.plan import EachLength
from harness.measuring.runner import MeasurementError, Options
from harness.measuring.sampler import Recorder, Sampler
from harness.measuring.trees import whole_tree
from harness.sample import Correctness, Sample
from harness.source import GUIDE_FORK, compiled_without_source
from harness.terminal import ends_quietly, one_line, printable
from harness.workload import VALIDATOR_LENGTHS
from neurons.runtime import observe
from neurons.runtime.errors import ConfigError, Postponed
from neurons.runtime.heartbeat import heartbeat
from neurons.runtime.machine import resolve_device
from neurons.runtime.process import Stopped, stop_on_signals
from neurons.validator.clone import Sources
from neurons.validator.devices import find_gpus
from neurons.validator.evaluate import Evaluator
from neurons.validator.packages import check_imports
from neurons.validator.sandbox import Sandbox, open_sandbox
from neurons.wire.protocol import QueuedSubmission
from neurons.wire.rules import league_of, weighted_score
from quasar_kernels.arguments import Parser, positive
from quasar_kernels.contract import check_tree, compiled_files

STOPPED = 130


def say(text: str) -> None:
    """Print a line, parts of which may come from a stranger's fork or its host."""
    print(one_line(text), flush=True)


def failure(text: str) -> SystemExit:
    """Return the exception that ends this script with such a line."""
    return SystemExit(one_line(text))


def fork_address(fork: str) -> str:
    """Return the address for git of a folder or an address; raise SystemExit for other text."""
    if "://" in fork:
        return fork
    if not Path(fork).is_dir():
        raise failure(f"There is no folder {fork}. Name a checkout or an https address.")
    if not (Path(fork, ".git").exists() or Path(fork, "HEAD").is_file()):
        raise failure(
            f"{fork} is not a git repository, which a claim needs. --repo-path {fork} judges "
            "a folder as it is."
        )
    return Path(fork).resolve().as_uri()


def newest_commit(address: str, branch: str) -> str:
    """Return the full hash of the branch's tip; raise SystemExit if there is none."""
    command = ["git", "ls-remote", "--exit-code", "--", address, f"refs/heads/{branch}"]
    quiet = os.environ | {"GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "https:file"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=quiet)
    if run.returncode:
        why = run.stderr.strip() or "no such branch (--branch names another, --commit a commit)"
        raise failure(f"{address}, branch {branch}: {why}")
    return run.stdout.split()[0]


class _Printer(Recorder):
    """Prints what has passed."""

    def checked(self, correctness: Correctness) -> None:
        checks = f"{len(correctness.checks)} checks on {correctness.device}"
        say(f"pass  correctness: {checks}, {correctness.dtype}")

    def accepted(self, sample: Sample, _number: int) -> None:
        speed = f"{sample.tokens_per_sec:,.0f} tokens/s, {sample.vram_mb:,.0f} MiB"
        say(f"pass  {sample.length} tokens: {speed}")


def judge_checkout(tree: Path, lengths: tuple[int, ...], options: Options, *, debug: bool) -> int:
    """Print the rules that a tree breaks, or measure it; return the exit status."""
    broken, timed_out = [f"rules: {violation}" for violation in check_tree(tree)], False
    # byte code that Python writes next to an overlay is never published
    is_fork = (tree / "fla/__init__.py").exists()
    compiled = compiled_files(tree / "fla") if is_fork else compiled_without_source(tree)
    broken += [f"compiled files: fla/{name}; publish its source" for name in compiled]
    try:
        if not broken:
            say("pass  rules")
            with whole_tree(tree) as whole:
                sampler = Sampler(tree=whole, options=options, recorder=_Printer())
                sampler.run(EachLength(lengths))
    except MeasurementError as error:
        broken, timed_out = [error.explain()], error.kind == "timeout"
        if debug:
            print(printable(error.log_tail, allowed="\n"), file=sys.stderr)
    for reason in broken:
        say(f"FAIL  {reason}")
    if broken:
        say(undecided(options.device) if timed_out else "REJECTED")
        return 1
    speed, length = sampler.of(max(lengths))[0].tokens_per_sec, max(lengths)
    league, multiplier = league_of(length)
    best = f"PASSED; weighted score {weighted_score(speed, length):,.0f} at {length} tokens"
    say(f"{best}; league {league}, multiplier {multiplier}")
    return 0


def undecided(device: str) -> str:
    """Return the verdict on a fork that was not timed within the limit, with this machine's load.

    Only an idle machine with a GPU resembles a validator's, which would reject it.
    """
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    where = f"the load of {cores} cores is {load:.1f}"
    if resolve_device(device) == "cuda" and load < cores:
        return f"REJECTED: it exceeded the time limit, and this machine is not busy: {where}"
    return (
        f"UNDECIDED: this machine may be too slow or busy: {where}. Repeat it on an idle machine "
        "with a GPU, or with a longer --timeout"
    )


def find_sandbox(device: str, stop: threading.Event) -> Sandbox | None:
    """Return the validator's sandbox; None, after a warning, if none works on this machine."""
    gpu = find_gpus(os.environ)[0] if resolve_device(device) == "cuda" else None
    try:
        sandbox = open_sandbox(gpu)
        check_imports(sandbox, sandbox.packages.withheld, stop)
    except ConfigError as error:
        say(f"WARNING: the fork's code runs with your rights. {error}")
        return None
    return sandbox


@ends_quietly
def main() -> int:
    """Judge the fork, print the verdict, and return the exit status."""
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("fork", nargs="?", help="https address or folder of the fork")
    parser.add_argument("--claim", type=float, help="tokens per second to claim")
    parser.add_argument("--target", type=positive, default=100_000, help="target sequence length")
    parser.add_argument(
        "--repo-path", type=Path, help="a checkout or an overlay to judge without a claim"
    )
    parser.add_argument("--seq-len", type=positive, help="length in tokens to judge it at (2048)")
    parser.add_argument("--full", action="store_true", help="512, 1024, 2048 and the target")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--commit", help="full hash; otherwise the branch's newest commit")
    which.add_argument("--branch", default="quasar", help="branch to judge (quasar)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one length")
    parser.add_argument("--debug", action="store_true", help="print a failed worker's log")
    args = parser.parse_args()
    observe.configure()
    log = observe.get_logger("validator")
    if args.fork is None and args.repo_path is None and GUIDE_FORK.is_dir():
        args.repo_path = GUIDE_FORK
    if args.repo_path is not None:
        if not args.repo_path.is_dir():
            wrong = f"--repo-path {args.repo_path} is not a folder"
            parser.error(one_line(f"{wrong}: name the root of a checkout"))
        lengths = {args.seq_len or 2048}
        if args.full:
            lengths = {*VALIDATOR_LENGTHS, args.seq_len or args.target}
        options = Options(args.device, args.timeout)
        with heartbeat(log, "judging"):
            return judge_checkout(args.repo_path, tuple(lengths), options, debug=args.debug)
    if args.fork is None or args.claim is None:
        parser.error("name a fork and its --claim, or a checkout by --repo-path")

    address = fork_address(args.fork)
    submission = QueuedSubmission(
        id=0,
        miner_hotkey="local",
        fork_url=address,
        commit_hash=args.commit or newest_commit(address, args.branch),
        target_sequence_length=args.target,
        tokens_per_sec=args.claim,
        created_at=datetime.now(timezone.utc).isoformat(),
    )
    stop = threading.Event()
    with tempfile.TemporaryDirectory(prefix="quasar-") as folder, stop_on_signals(stop):
        judge = Evaluator(
            *(Path(folder), args.device, args.timeout),
            sources=Sources(hosts=(), files=True),
            stop=stop,
            confinement=find_sandbox(args.device, stop),
        )
        try:
            with heartbeat(log, "judging"):
                verdict = judge.evaluate(submission)
        except Stopped:
            return STOPPED
        except Postponed as fault:
            raise failure(f"No verdict: {fault}") from None
    league, multiplier = league_of(args.target)
    if verdict.timed_out:
        say(verdict.reason)
        say(undecided(args.device))
        return 1
    say(f"{'PASSED' if verdict.passed else 'REJECTED'}: {verdict.reason}")
    say(f"score {verdict.score:.3f}; league {league}, multiplier {multiplier}")
    if verdict.passed:
        say(f"weighted score {weighted_score(args.claim, args.target):,.0f}")
    return 0 if verdict.passed else 1


if __name__ == "__main__":
    sys.exit(main())
