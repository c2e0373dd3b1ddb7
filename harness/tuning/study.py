"""A search for the tiles of one GPU, which several processes can share and resume.

Optuna proposes candidates, and SQLite stores each trial when it ends. A killed process loses only
its current trial, and the next process continues the search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState
from sqlalchemy.engine import URL

from harness.analysis.difference import Block, Difference, difference

Tiles = dict[str, int]
"""Values of `tiles.Tiles` by field."""

CHOICES: Mapping[str, tuple[int, ...]] = {
    "chunk": (16, 32),
    "intra_chunks": (1, 2, 4, 8),
    "intra_warps": (1, 2, 4, 8),
    "intra_stages": (1, 2, 3, 4),
    "map_rows": (16, 32, 64),
    "map_warps": (1, 2, 4, 8),
    "map_stages": (1, 2, 3, 4),
    "scan_cols": (16, 32, 64),
    "scan_warps": (1, 2, 4, 8),
    "value_cols": (16, 32, 64),
    "output_warps": (1, 2, 4, 8),
    "output_stages": (1, 2, 3, 4),
}
"""Candidate values of the forward pass's fields; the other fields keep the start's values."""

BEAT_SECONDS = 10
"""Interval of a process's heartbeats; after six without one, its trial counts as killed."""


class Refused(Exception):
    """A candidate fails to run or computes a wrong result; the message gives the reason."""


Report = Callable[[int, float], None]
"""`report(step, value)` records the value so far, and ends a trial worse than the median."""

Objective = Callable[[Tiles, Report], float]
"""Returns the tiles' time divided by the start's (less is better), or raises `Refused`."""


def open_study(storage: Path | str, name: str, seed: int | None = None) -> optuna.Study:
    """Open or create the study of this name in an SQLite file or the database at a URL."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if isinstance(storage, Path):  # the path may contain `?`, `#`, `%` and braces
        storage = URL.create("sqlite", database=str(storage.resolve())).render_as_string()
    return optuna.create_study(
        storage=optuna.storages.RDBStorage(
            storage, heartbeat_interval=BEAT_SECONDS, grace_period=6 * BEAT_SECONDS
        ),
        sampler=optuna.samplers.TPESampler(seed=seed, multivariate=True),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=8),
        study_name=name,
        load_if_exists=True,
    )


def done(study: optuna.Study) -> int:
    """Return the number of trials that have ended, including refused and pruned ones."""
    ended = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
    return len(study.get_trials(deepcopy=False, states=ended))


def search(
    study: optuna.Study,
    start: Tiles,
    objective: Objective,
    *,
    trials: int,
    seconds: float | None = None,
    footprint: Callable[[], Mapping[str, Any]] = dict,
) -> None:
    """Try candidates until `trials` of all processes have ended, or for `seconds`.

    The first candidate is `start`. Each trial is stored with the result of `footprint`.
    """
    study.set_user_attr("start", start)
    searched = {name: start[name] for name in CHOICES}
    study.enqueue_trial(searched, skip_if_exists=True)

    def run(trial: optuna.Trial) -> float:
        chosen = {
            name: trial.suggest_categorical(name, sorted({start[name], *values}))
            for name, values in CHOICES.items()
        }

        def report(step: int, value: float) -> None:
            trial.report(value, step)
            if trial.should_prune():
                raise optuna.TrialPruned

        try:
            value = objective({**start, **chosen}, report)
        except Refused as error:
            trial.set_user_attr("refused", str(error))
            raise optuna.TrialPruned(str(error)) from error
        finally:
            trial.set_user_attr("footprint", footprint())
        if not (math.isfinite(value) and value > 0):
            raise optuna.TrialPruned(f"a time of {value}")
        return value

    def enough(study: optuna.Study, _trial: optuna.trial.FrozenTrial) -> None:
        if done(study) >= trials:
            study.stop()

    if done(study) < trials:
        study.optimize(run, timeout=seconds, callbacks=[enough])


def candidates(study: optuna.Study) -> list[dict[str, Any]]:
    """Return each candidate's tiles, time over the start's, refusal and footprint.

    The fastest come first. Refused and pruned candidates have no time and come last.
    """
    ended = [t for t in study.get_trials(deepcopy=False) if t.state.is_finished()]
    results = [
        {
            "tiles": dict(t.params),
            "time": t.value if t.state == TrialState.COMPLETE else None,
            "refused": t.user_attrs.get("refused", ""),
            "footprint": t.user_attrs.get("footprint", {}),
        }
        for t in ended
    ]
    return sorted(results, key=lambda one: (one["time"] is None, one["time"] or 0.0))


def best_tiles(study: optuna.Study) -> Tiles:
    """Return the best tiles so far, or the start if no candidate has completed."""
    start: Tiles = study.user_attrs["start"]
    try:
        return {**start, **study.best_params}
    except ValueError:
        return start


def conclude(
    study: optuna.Study, blocks: Iterable[Block]
) -> tuple[Tiles, Difference, dict[str, Any]]:
    """Return the tiles to use, how much faster the best ones are, and the evidence.

    The best ones (B) are used only if the blocks show them to be faster than the start (A).
    """
    gain = difference(list(blocks))
    tiles = best_tiles(study) if gain.faster else study.user_attrs["start"]
    trials = study.get_trials(deepcopy=False)
    refused = sorted({t.user_attrs["refused"] for t in trials if "refused" in t.user_attrs})
    evidence = {
        "candidates": candidates(study),
        "trials": done(study),
        "completed": sum(t.state == TrialState.COMPLETE for t in trials),
        "refused": refused[:10],
        "gain": {"ratio": gain.ratio, "low": gain.low, "high": gain.high},
        "taken": gain.faster,
    }
    return tiles, gain, evidence
