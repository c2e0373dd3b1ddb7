"""Candidates that fail to run, without a GPU."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from harness.tuning import candidates
from harness.tuning.candidates import Candidates
from harness.tuning.study import Refused

FAULT = "CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress'"


@pytest.fixture
def failing(monkeypatch) -> Any:
    """Candidates whose check fails."""

    def fail(*_: object) -> None:
        raise RuntimeError(FAULT)

    monkeypatch.setattr(candidates, "errors_of", fail)
    one = object.__new__(Candidates)
    one._of, one._scan = namedtuple("Tiles", "chunk"), None
    return one


def test_a_candidate_that_does_not_run_is_refused(failing, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(Refused, match="does not run: RuntimeError: CUDA error: an illegal"):
        failing._check({"chunk": 16})


def test_a_broken_cuda_context_ends_the_process(failing, monkeypatch):
    def fail() -> None:
        raise RuntimeError(FAULT)

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(SystemExit, match="Start the search again"):
        failing._check({"chunk": 16})
