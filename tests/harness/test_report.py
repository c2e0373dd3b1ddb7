"""The report file: round trip, incomplete and altered files."""

from __future__ import annotations

import hashlib
import json
from datetime import timezone
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from harness.report import Report, ReportError, build_report, load_report, write_report
from harness.sample import Failure, Sample
from tests.harness.samples import environment, make_sample, telemetry

HERE = environment()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "report.json"


def sample() -> Report:
    states = telemetry({"sm_clock_mhz": 1980}, {"sm_clock_mhz": 1755, "slowdowns": ("power cap",)})
    runs = [make_sample(512, environment=HERE), make_sample(1024, telemetry=states)]
    failure = Failure(length=2048, kind="out_of_memory", reason="CUDA out of memory")
    return build_report("as a validator", "a" * 40, runs, [failure])


def test_round_trip(tmp_path: Path) -> None:
    report = sample()
    digest = write_report(tmp_path / "new" / "report.json", report)
    assert load_report(tmp_path / "new" / "report.json") == report
    assert len(digest) == 64
    assert report.created_at.tzinfo is timezone.utc
    assert report.environment == HERE
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["report.json"]


def test_the_file_has_each_correctness_check_once(path: Path) -> None:
    first, second = (make_sample(512), make_sample(1024))
    assert first.correctness is not None
    other = first.correctness.model_copy(update={"longest": 2048})
    third = make_sample(2048, correctness=other)
    report = build_report("p", None, [first, second, third, make_sample(correctness=None)])
    write_report(path, report)
    body = json.loads(path.read_text())["report"]
    assert [one["longest"] for one in body["gates"]] == [first.correctness.longest, 2048]
    assert [one["gate"] for one in body["measurements"]] == [0, 0, 1, None]
    assert load_report(path) == report


def with_digest(body: object) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "report": body})


@pytest.mark.parametrize(
    "change", [{"gates": []}, {"measurements": 3}, {"measurements": [{}]}, {"schema_version": 4}]
)
def test_wrong_fields_are_refused(path: Path, change: dict[str, Any]) -> None:
    write_report(path, sample())
    body = json.loads(path.read_text())["report"]
    path.write_text(with_digest({**body, **change}))
    with pytest.raises(ReportError, match="do not fit; measure again"):
        load_report(path)


def test_row_19_other_files_are_refused(path: Path) -> None:
    with pytest.raises(ReportError, match=r"report\.json: No such file"):
        load_report(path)
    write_report(path, sample())
    altered, torn = path.read_text().replace("1000.0", "9000.0", 1), "not JSON, the file is torn; "
    bad = ('{"report": {"a": NaN}}', '{"report": {"a": 1e999}}', "[" * 200_000)
    others = ((altered, "sha256"), ("[]", "not a report"), ('{"report": 3}', "not a"))
    for text, reason in (*others, *((text, f"{torn}measure again") for text in bad)):
        path.write_text(text)
        with pytest.raises(ReportError, match=reason):
            load_report(path)


def test_row_19_every_incomplete_file_is_refused(path: Path) -> None:
    write_report(path, sample())
    whole = path.read_bytes()
    for size in range(0, len(whole) - 2, 97):  # all but the last brace and newline
        path.write_bytes(whole[:size])
        with pytest.raises(ReportError, match="measure again"):
            load_report(path)


def test_row_17_a_failed_write_keeps_the_old_file(path, monkeypatch):
    write_report(path, sample())
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        write_report(path, sample())
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["report.json"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_row_25_a_sample_cannot_have_an_impossible_speed(value: float) -> None:
    fields = {**make_sample().model_dump(), "tokens_per_sec": value}
    with pytest.raises(ValidationError, match="tokens_per_sec"):
        Sample.model_validate(fields)


def test_unchecked_samples_mark_the_report() -> None:
    assert sample().checked
    assert not build_report("p", None, [make_sample(), make_sample(correctness=None)]).checked


def test_two_machines_cannot_share_a_report() -> None:
    other = HERE.model_copy(update={"torch": "2.9"})
    runs = [make_sample(environment=HERE), make_sample(environment=other)]
    with pytest.raises(ValueError, match="different environments"):
        build_report("p", None, runs)
