"""The output of `status`, and the summary that ends `once`, read from the journal."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from harness.terminal import span
from neurons.miner.cycle import VERDICTS, State, Submission
from neurons.miner.journal import Journal
from neurons.miner.recorder import Measuring, read_progress
from neurons.runtime.errors import ConfigError
from neurons.runtime.process import is_locked
from neurons.wire.rules import league_of, weighted_score

JOURNAL = "journal.sqlite"
SECRET_FIELDS = ("salt",)
_NEXT_ACTION = {
    State.NEW: "publish the kernels to the fork",
    State.PUBLISHED: "measure the fork's commit",
    State.MEASURED: "derive the claim",
    State.COMMITTING: "look the commitment up on the server, send it if it is missing",
    State.COMMITTED: "reveal when the server reaches the reveal block",
    State.SUBMITTING: "look the submission up on the server, send it if it is missing",
    State.REVEALING: "send the reveal again",
    State.REVEALED: "wait for a validator's verdict",
}


@dataclass(frozen=True)
class Status:
    """The newest submission, the newest one with a verdict, and whether a miner is running."""

    state_dir: Path
    running: bool
    submission: Submission | None
    verdict: Submission | None
    judges_early_at: float | None = None  # as `Journal.judges_early` for the submission's API
    # the progress of the measurement that the running miner or `bench` makes
    measuring: Measuring | None = None
    # the newest submissions, newest first, up to the requested number
    history: tuple[Submission, ...] = ()
    others: tuple[Submission, ...] = ()  # live submissions of hotkeys other than the configured one

    def as_json(self) -> dict[str, Any]:
        """Return the output of `status --json`; times are Unix seconds."""
        return {
            "state_dir": str(self.state_dir),
            "running": self.running,
            "submission": _as_json(self.submission),
            "verdict": _as_json(self.verdict),
            "judges_early_at": self.judges_early_at,
            "measuring": self.measuring.model_dump() if self.measuring else None,
            "history": [_as_json(one) for one in self.history],
            "others": [_as_json(one) for one in self.others],
        }

    def as_text(self) -> str:
        running = "running" if self.running else "not running"
        lines = [f"miner       {running}, state in {self.state_dir}"]
        if self.submission is None:
            lines.append("submission  none yet: ./START_MINER.sh once makes the first")
            lines += _progress(self.measuring)
            return "\n".join([*lines, *map(_other, self.others)])
        deadline = deadline_of(self.submission, time.time())
        lines += [*_figures("submission", self.submission), *_reasons(self.submission)]
        waits = self.running or self.submission.state in VERDICTS
        start = "" if waits else "start the miner: "
        lines.append(f"  next      {start}{next_action(self.submission)}")
        lines += _progress(self.measuring)
        if deadline is not None:
            lines.append(f"  at        {_moment(deadline)}")
        if self.judges_early_at is not None:
            lines.append(
                "  api       may judge commitments before their reveal (last sign "
                f"{_moment(self.judges_early_at)}); SUBMISSION_MODE=auto submits directly"
            )
        if self.verdict is not None and self.verdict.id != self.submission.id:
            lines += _figures("last verdict", self.verdict)
        lines += map(_other, self.others)
        if self.history:
            lines += ["", *_table(self.history)]
        return "\n".join(lines)


def find_journal(state_dir: Path) -> Path | None:
    """Return the journal's path; None if there is none. Raise a ConfigError without access."""
    path = state_dir / JOURNAL
    try:
        return path if path.is_file() else None
    except PermissionError:
        raise wrong_user_error(state_dir) from None


def wrong_user_error(state_dir: Path) -> ConfigError:
    """Return the error, with its remedy, for a state folder that this user cannot read."""
    return ConfigError(
        f"The state folder {state_dir} belongs to another user: run this as the user that "
        "runs the miner, or set STATE_DIR."
    )


def read_status(state_dir: Path, hotkey: str | None = None, history: int = 0) -> Status:
    """Read the journal of `state_dir`; without a journal, the status is empty.

    It shows the submissions of one hotkey or, for None, of all, and the `history` newest ones.
    Raises a ConfigError if the journal is damaged, of a newer version or another user's.
    """
    measuring = read_progress(state_dir)  # before the lock: its holder may die in between
    running = is_locked(state_dir)
    if not running:
        measuring = None
    path = find_journal(state_dir)
    if path is None:
        return Status(state_dir, running, None, None, measuring=measuring)
    with Journal(path, copy=True) as journal:
        everybody = journal.live_submissions()
        live = [one for one in everybody if hotkey in (None, one.hotkey)]
        recent = journal.latest(max(50, history), hotkey=hotkey)
        shown = next(iter([*live, *recent]), None)
        early = journal.judges_early(shown.api_url, time.time()) if shown else None
    return Status(
        state_dir,
        running,
        submission=shown,
        verdict=next((one for one in recent if one.state in VERDICTS), None),
        judges_early_at=early,
        measuring=measuring,
        history=tuple(recent[:history]),
        others=tuple(one for one in everybody if one not in live),
    )


def summary(submission: Submission, state_dir: Path) -> str:
    """Return the result of one submission, for the end of `once`."""
    report = [f"  report    {state_dir / submission.report}"] if submission.report else []
    return "\n".join([*_figures("submission", submission), *report, *_reasons(submission)])


def _reasons(submission: Submission) -> list[str]:
    rows = {"reason": submission.reason, "remedy": submission.remedy}
    return [f"  {name}    {text}" for name, text in rows.items() if text]


def deadline_of(submission: Submission, now: float) -> float | None:
    """Return the Unix time at which a FAILED or HELD submission is retried, or None."""
    if not submission.paused:
        return None
    length = max(0.0, (submission.retry_at or 0.0) - submission.updated_at)
    return min(submission.retry_at or now, now + length)  # the clock may have been turned back


def next_action(submission: Submission) -> str:
    state = submission.state
    if state is State.HELD and not submission.paused:
        then = "abandon" if submission.resume_state is None else "release"
        return f"run `{then}` after the remedy; the miner does not continue it by itself"
    if submission.paused:
        return f"try again: {_NEXT_ACTION.get(submission.position, 'submit the claim')}"
    if state is State.CLAIMED:
        return "submit the claim" if submission.mode == "direct" else "commit to the claim"
    if state is State.NEW and submission.publish_at == "before_reveal":
        return "commit the kernels on this machine; they become public just before the reveal"
    if state is State.COMMITTED:
        return f"reveal when the server reaches block {submission.reveal_block}"
    if state is State.ABANDONED:
        return "make a new submission"
    return _NEXT_ACTION.get(state, "none: a new cycle starts with a new round or changed kernels")


def _table(submissions: tuple[Submission, ...]) -> list[str]:
    """Return the history as lines, one per submission, newest first."""
    lines = [
        f"{'no.':>5}  {'last change (UTC)':17}  {'state':9}  {'target':>9}  {'claim':>13}  rank"
    ]
    for one in submissions:
        moment = datetime.fromtimestamp(one.updated_at, timezone.utc)
        claim = "" if one.tokens_per_sec is None else f"{one.tokens_per_sec:,.1f}"
        target = f"{one.target_sequence_length:,}" if one.target_sequence_length else "auto"
        rank = "" if one.rank is None else str(one.rank)
        line = f"{one.id:>5}  {moment:%Y-%m-%d %H:%MZ}  {one.state.value:9}  {target:>9}"
        lines.append(f"{line}  {claim:>13}  {rank:>4}  {one.reason or ''}".rstrip())
    return lines


def _figures(title: str, submission: Submission) -> list[str]:
    verdict = submission.state.value
    if submission.rank is not None:
        verdict += f", rank {submission.rank}"
    if submission.weight is not None:
        verdict += f", weight {submission.weight:g}"
    name = f"{submission.id} locally"
    if submission.submission_id is not None:
        name += f", number {submission.submission_id} at the server"
    lines = [f"{title}  {verdict}  ({name}; {_moment(submission.updated_at)})"]
    target = submission.target_sequence_length
    if not target:
        lines.append("  target    auto: the best length that can be measured here")
    else:
        league, factor = league_of(target)
        lines.append(f"  target    {target:,} tokens, league {league}, multiplier {factor:g}")
    if submission.tokens_per_sec is not None:
        score = submission.weighted_score
        if submission.state is State.REJECTED:
            score = 0.0  # the journal has the claim's score
        elif score is None:
            score = weighted_score(submission.tokens_per_sec, target)
        lines.append(f"  claim     {submission.tokens_per_sec:,.1f} tokens/s at {target:,} tokens")
        lines.append(f"  score     {score:,.1f} weighted")
    if submission.fork_url:
        lines.append(f"  fork      {submission.fork_url} at {submission.commit_hash}")
    return lines


def _other(submission: Submission) -> str:
    return (
        f"other       submission {submission.id} of the hotkey {submission.hotkey} is "
        f"{submission.state.value}: set WALLET_MINER_NAME and WALLET_HOTKEY back until its verdict"
    )


def _progress(measuring: Measuring | None) -> list[str]:
    if measuring is None:
        return []
    lines = [f"  measuring for {span(max(0.0, time.time() - measuring.began))}"]
    for one in measuring.lengths:
        done = len(one.speeds)
        run = f"run {done + 1} of {one.planned}" if done < one.planned else f"{done} runs done"
        speeds = ", ".join(f"{speed:,.0f}" for speed in one.speeds)
        suffix = f": {speeds} tokens/s" if speeds else ""
        lines.append(f"    {one.length:>9,} tokens, {run}{suffix}")
    return lines


def _as_json(submission: Submission | None) -> dict[str, Any] | None:
    if submission is None:
        return None
    fields = {name: value for name, value in vars(submission).items() if name not in SECRET_FIELDS}
    target = submission.target_sequence_length  # 0 until `auto` has decided
    return {
        **fields,
        "league": league_of(target)[0] if target else None,
        "deadline": deadline_of(submission, time.time()),
        "next_action": next_action(submission),
    }


def _moment(unix: float) -> str:
    moment = datetime.fromtimestamp(unix, timezone.utc)
    seconds = unix - time.time()
    distance = f"in {span(seconds)}" if seconds > 0 else f"{span(-seconds)} ago"
    return f"{moment:%Y-%m-%d %H:%M:%SZ}, {distance}"
