"""A search for the tiles of one GPU that any number of processes may share, and none can lose.

Optuna proposes, SQLite keeps every trial as it ends: a process that is killed loses the trial that
it was in, and the next one goes on from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState

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
"""What is tried for each field of the forward pass; the others stay as they are."""

BEAT_SECONDS = 10
"""A process says that its trial lives; one that was silent for six of these is taken as killed."""


class Refused(Exception):
    """A candidate does not run, or computes something else; the message says which."""


Report = Callable[[int, float], None]
"""`report(step, value)`: the value so far; it ends a trial that is worse than most were there."""

Objective = Callable[[Tiles, Report], float]
"""Time of some tiles over that of the start, less is better; raises `Refused`."""


def open_study(storage: Path | str, name: str, seed: int | None = None) -> optuna.Study:
    """Open the study of this name, or make it.

    Args:
        storage: file of an SQLite database, or the URL of another one that several hosts reach.
        seed: of the sampler; None takes another one each time.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    url = storage if isinstance(storage, str) else f"sqlite:///{storage.resolve()}"
    return optuna.create_study(
        storage=optuna.storages.RDBStorage(
            url, heartbeat_interval=BEAT_SECONDS, grace_period=6 * BEAT_SECONDS
        ),
        sampler=optuna.samplers.TPESampler(seed=seed, multivariate=True),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=8),
        study_name=name,
        load_if_exists=True,
    )


def done(study: optuna.Study) -> int:
    """Return how many trials have ended, refused and pruned ones too."""
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
    """Try candidates until `trials` have ended, earlier processes' counted, or for `seconds`.

    The first candidate is `start`. What `footprint` returns of the last one is kept with its trial.
    """
    study.set_user_attr("start", start)
    searched = {name: start[name] for name in CHOICES}
    study.enqueue_trial(searched, skip_if_exists=True)

    def run(trial: optuna.Trial) -> float:
        chosen = {
            name: trial.suggest_categorical(name, _with(start[name], values))
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


def _with(value: int, values: Iterable[int]) -> list[int]:
    return sorted({value, *values})


def candidates(study: optuna.Study) -> list[dict[str, Any]]:
    """Return what each candidate was, took and came to: the fastest first, then the refused.

    `time` is over the start's; a candidate without one was refused, or given up as slower.
    """
    ended = [t for t in study.get_trials(deepcopy=False) if t.state.is_finished()]
    found = [
        {
            "tiles": dict(t.params),
            "time": t.value if t.state == TrialState.COMPLETE else None,
            "refused": t.user_attrs.get("refused", ""),
            "footprint": t.user_attrs.get("footprint", {}),
        }
        for t in ended
    ]
    return sorted(found, key=lambda one: (one["time"] is None, one["time"] or 0.0))


def best_tiles(study: optuna.Study) -> Tiles:
    """Return the best tiles so far; the start where no other one ran.

    Raises:
        KeyError: nothing was searched yet.
    """
    start: Tiles = study.user_attrs["start"]
    try:
        return {**start, **study.best_params}
    except ValueError:
        return start


def conclude(
    study: optuna.Study, blocks: Iterable[Block]
) -> tuple[Tiles, Difference, dict[str, Any]]:
    """Return the tiles to use, how much faster the best ones are, and the evidence.

    Args:
        blocks: speeds of the start (A) and of the best tiles (B), in any unit. The best tiles are
            taken only if these show them to be faster.
    """
    found = difference(list(blocks))
    taken = best_tiles(study) if found.faster else study.user_attrs["start"]
    trials = study.get_trials(deepcopy=False)
    refused = sorted({t.user_attrs["refused"] for t in trials if "refused" in t.user_attrs})
    evidence = {
        "candidates": candidates(study),
        "trials": done(study),
        "completed": sum(t.state == TrialState.COMPLETE for t in trials),
        "refused": refused[:10],
        "gain": {"ratio": found.ratio, "low": found.low, "high": found.high},
        "taken": found.faster,
    }
    return taken, found, evidence
