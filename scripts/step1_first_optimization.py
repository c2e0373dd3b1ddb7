"""Compare the speeds of the public fork and of these kernels: a newcomer's first measurement.

    python scripts/step1_first_optimization.py [--skip-setup] [--fork DIR] [--lengths 512,2048]

The script clones the public fork into DIR, copies these kernels over a copy of it, checks that
copy's results, and times both by the validator's loop in fresh processes. It writes a table
(step1.md) and a plot (step1.svg). --skip-setup uses the clone that DIR already contains. Without
DIR, a clone in quasar_work/flash-linear-attention is used if there is one.

The public fork is not checked: it does not compute the recurrence that it documents, so only its
speed is compared. A machine without a GPU cannot run it. There, these kernels are compared with a
second copy of themselves, which shows the noise. The exit status is 0 if these kernels pass the
correctness check.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness.analysis.ab_compare import Comparison, block_printer, plot, table
from harness.analysis.difference import MIN_BLOCKS
from harness.measuring.runner import CheckTree, Measure, MeasurementError, Options, check, measure
from harness.source import GUIDE_FORK
from harness.terminal import Progress, ends_quietly
from harness.workload import parse_lengths
from neurons.miner.tuner import Rejected, copy_fork
from neurons.runtime.errors import QuasarError
from neurons.runtime.settings import Settings
from quasar_kernels.arguments import Parser, output_file
from quasar_kernels.contract import LAYER_FILE, OVERLAY

PUBLIC_FORK = Path("state/public-fork")
NAMES = ("public fork", "these kernels")


def clone(folder: Path, address: str) -> None:
    """Clone a fork's newest commit into a new folder; raise a QuasarError if this fails."""
    if folder.exists():
        raise QuasarError(f"{folder} already exists; give --skip-setup to use it as it is.")
    command = ["git", "clone", "--quiet", "--depth", "1", "--", address, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise QuasarError(
            f"{address} cannot be cloned: {done.stderr.strip()}. Clone it another way and give its "
            "folder by --fork, with --skip-setup."
        )


def runs_here(fork: Path, length: int, device: str, timer: Measure, *, debug: bool) -> Path | None:
    """Return the fork if it can be timed on this machine; else print the reason."""
    try:
        timer(fork, length, Options(device), cross_check=False)
    except MeasurementError as error:
        print(f"this machine cannot time the public fork: {error.explain(debug=debug)}", flush=True)
        return None
    return fork


@ends_quietly
def main(
    argv: Sequence[str] | None = None, *, timer: Measure = measure, checker: CheckTree = check
) -> int:
    """Set up, compare, and write the table and the plot; return the exit status."""
    upstream = f"https://github.com/{Settings.model_fields['github_upstream'].default}.git"
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--skip-setup", action="store_true", help="DIR already contains the fork")
    present = GUIDE_FORK if GUIDE_FORK.is_dir() else None
    parser.add_argument("--fork", type=Path, metavar="DIR", help=f"the clone ({PUBLIC_FORK})")
    parser.add_argument("--upstream", default=upstream, help="repository to clone")
    parser.add_argument(
        "--lengths", type=parse_lengths, default="512,1024,2048", help="sequence lengths"
    )
    blocks = f"of three processes each, at least {MIN_BLOCKS} ({MIN_BLOCKS})"
    parser.add_argument("--blocks", "--pairs", type=int, default=MIN_BLOCKS, help=blocks)
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument(
        "--out",
        type=lambda text: output_file(str(Path(text).with_suffix(".md"))),
        default="step1",
        help="table and plot (step1)",
    )
    parser.add_argument("--debug", action="store_true", help="print a failed worker's log")
    args = parser.parse_args(argv)
    if args.blocks < MIN_BLOCKS:
        parser.error(f"--blocks must be at least {MIN_BLOCKS}")
    try:
        if args.fork is None and present:
            args.skip_setup = True
            print(f"using the fork in {present}", flush=True)
        args.fork = args.fork or present or PUBLIC_FORK
        if not args.skip_setup:
            clone(args.fork, args.upstream)
        if not (args.fork / LAYER_FILE).is_file():
            problem = f"{args.fork} does not contain {LAYER_FILE}; name a clone of the fork."
            raise QuasarError(problem)
        with tempfile.TemporaryDirectory(prefix="step1-") as name:
            shipped, copy = Path(name, "shipped"), Path(name, "copy")
            copy_fork(args.fork, OVERLAY, OVERLAY, "layer", shipped)
            correctness = checker(shipped, max(args.lengths), Options(args.device))
            print(f"correctness check: {'passed' if correctness.passed else 'FAILED'}", flush=True)
            for failed in correctness.failed[:3]:
                print(f"  {failed}")
            if not correctness.passed:
                return 1
            fork = runs_here(
                args.fork.resolve(), min(args.lengths), args.device, timer, debug=args.debug
            )
            comparison = Comparison(
                Options(args.device),
                args.blocks,
                checked=False,
                measure=timer,
                on_block=block_printer(Progress(), args.blocks),
            )
            results = []
            if fork is None:
                copy_fork(args.fork, OVERLAY, OVERLAY, "layer", copy)
            for length, difference in comparison.run(fork or copy, shipped, args.lengths):
                results.append((length, difference))
                text = difference if fork else f"{difference.b:,.0f} tokens/s"
                print(f"{length:>9} tokens: {text}", flush=True)
    except (MeasurementError, QuasarError, Rejected) as error:
        reason = error.explain(debug=args.debug) if isinstance(error, MeasurementError) else error
        sys.stderr.write(f"{reason}\n")
        return 1
    names = NAMES if fork else (f"{NAMES[1]}, first", f"{NAMES[1]}, again")
    summary = table(results, names)
    args.out.write_text(summary)
    args.out.with_suffix(".svg").write_text(plot(results, names))
    print(f"\n{summary}\nwritten to {args.out} and {args.out.with_suffix('.svg')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
