"""Real workers over small trees: their results and their failures."""

from __future__ import annotations

import json
import os
import py_compile
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.measuring.process import Ended
from harness.measuring.runner import (
    MeasurementError,
    Options,
    child_environment,
    confirm,
    measure,
    probe,
    read_reply,
)
from harness.measuring.trees import whole_tree
from harness.source import source_digest, tree_commit
from harness.worker.subject.confine import landlock_version
from quasar_kernels.contract import OVERLAY
from tests.harness.samples import make_correctness, make_sample
from tests.processes import HANG, is_alive, run_python, wait_for
from tests.repositories import commit, run_git

CPU = Options("cpu", HANG)


def fails(tree: Path, options: Options = CPU) -> MeasurementError:
    with pytest.raises(MeasurementError) as caught:
        measure(tree, 16, options, cross_check=False)
    return caught.value


def test_a_worker_for_cuda_fails_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(MeasurementError, match="no CUDA device") as caught:
        probe(Options("cuda"))
    assert caught.value.kind == "crash"


def test_a_stop_ends_a_probe() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(MeasurementError) as caught:
        probe(replace(CPU, stop=stop))
    assert caught.value.kind == "stopped"


# ---- the correctness check --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"passed": False}, "wrong results: relative RMS error"),
        ({"digest": "0" * 64}, "the code changed after its correctness check"),
        ({"longest": 511}, "its correctness check stopped at 511 tokens"),
    ],
)
def test_only_a_passed_check_of_the_same_code_and_enough_tokens_counts(changes, reason):
    correctness = make_correctness(**changes)
    with pytest.raises(MeasurementError, match=reason) as caught:
        confirm(make_sample(512), correctness)
    assert (caught.value.kind, caught.value.correctness) == ("gate", correctness)
    whole = make_correctness(longest=65536)
    assert confirm(make_sample(1_000_000), whole).correctness == whole


def test_unchecked_wrong_code_is_timed_and_its_prints_ignored(make_tree: Any) -> None:
    forged = (
        "_right = chunk_quasar\n"
        "def chunk_quasar(q, k, v, beta, **options):\n"
        "    o, state = _right(q, k, v, beta, **options)\n"
        "    return o * 2 + v, state\n"
        'print("RESULT: 99999999999.0")\n'
        'print(\'{"nonce": "", "body": {"tokens_per_sec": 1e12}}\', flush=True)\n'
    )
    tree = make_tree(forged)
    sample = measure(tree, 16, CPU, cross_check=False)
    assert sample.correctness is None
    assert sample.tokens_per_sec < 1e7, "printed text was used as the result"
    assert not list(tree.rglob("__pycache__")), "measuring changed the tree"


# ---- failures --------------------------------------------------------------------------------


def test_the_deadline_includes_imports(make_tree: Any) -> None:
    error = fails(make_tree("import time; time.sleep(3600)"), replace(CPU, timeout=0.5))
    assert (error.kind, error.reason) == ("timeout", "not done within 0.5 s")


@pytest.mark.parametrize(
    ("code", "kind", "reason"),
    [
        ("os._exit(0)", "protocol", "without a result"),
        ("os.kill(os.getpid(), 9)", "out_of_memory", "another process killed the worker"),
        ("to_every_descriptor(b'{}\\n')", "protocol", "malformed"),
        ("to_every_descriptor(b'\\2\\0\\0\\0{}'); os._exit(0)", "protocol", "malformed"),
        (
            "text = b'{\"tensors\": [[\"o\", \"int8\", [1' + b',9' * 300000 + b']]]}'\n"
            "to_every_descriptor(len(text).to_bytes(4, 'little') + text); os._exit(0)",
            "protocol",
            "a tensor 'o' of shape (1, 9, 9",
        ),
    ],
)
def test_row_21_every_failure_has_its_kind(make_tree, code, kind, reason):
    tree = make_tree(
        "import os\n"
        "def to_every_descriptor(data):\n"
        "    for name in os.listdir('/proc/self/fd'):\n"
        "        try:\n"
        "            if int(name) > 2:\n"
        "                os.write(int(name), data)\n"
        "        except OSError:\n"
        "            pass\n"
        "print('a last word', flush=True)\n" + code
    )
    error = fails(tree)
    assert (error.kind, reason in error.reason) == (kind, True), error.reason[:200]
    assert len(error.reason) <= 2000, "a fork can fill the validator's log"
    assert "a last word" in error.log_tail


def test_the_subject_finds_no_secret_and_cannot_replace_the_referees_modules(
    make_tree: Any,
) -> None:
    """Its memory holds no nonce, and it can read neither the referee's memory nor its descriptors.

    Its folder is not on the import path, or the referee could import a file that it wrote.
    """
    tree = make_tree(
        "import gc, importlib.util, os\n"
        "from pathlib import Path\n"
        "from harness.measuring.job import Job\n"
        "referee = os.getppid()\n"
        "found = [type(one).__name__ for one in gc.get_objects() if isinstance(one, Job)]\n"
        "for name in ('mem', 'environ', 'fd/0'):\n"
        "    try:\n"
        "        found += Path(f'/proc/{referee}/{name}').open('rb') and [name]\n"
        "    except PermissionError:\n"
        "        pass\n"
        "found += [fd for fd in map(int, os.listdir('/proc/self/fd')) if fd > 2\n"
        "          and Path(f'/proc/self/fd/{fd}').exists() and 'pipe' in os.readlink(\n"
        "              f'/proc/self/fd/{fd}')]\n"
        "open('late.py', 'w').close()\n"
        "raise RuntimeError(f'found {found}, {importlib.util.find_spec(\"late\")}')\n"
    )
    error = fails(tree)
    assert (error.kind, error.reason) == ("crash", "RuntimeError: found [], None")


@pytest.mark.skipif(landlock_version() < 6, reason="needs Landlock of Linux 6.12")
def test_the_subject_cannot_kill_the_referee(make_tree: Any) -> None:
    error = fails(make_tree("import os; os.kill(os.getppid(), 9)"))
    assert (error.kind, error.reason[:15]) == ("crash", "PermissionError")


def test_byte_code_in_the_tree_is_not_run(make_tree: Any) -> None:
    tree = make_tree()
    layer = tree / "fla/layers/quasar.py"
    source = layer.read_text()
    layer.write_text("raise RuntimeError('the byte code ran')")
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(layer), invalidation_mode=unchecked)
    layer.write_text(source)
    assert measure(tree, 16, CPU, cross_check=False).length == 16


def test_compiled_code_in_the_tree_is_refused(make_tree: Any) -> None:
    tree = make_tree()
    (tree / "fla/ops/fast.so").write_bytes(b"\x7fELF")
    error = fails(tree)
    assert error.kind == "gate"
    assert "fla/ops/fast.so is compiled" in error.reason


def test_code_from_outside_the_tree_is_refused(make_tree: Any, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    tree = make_tree(package=f"__path__.insert(0, {str(elsewhere)!r})")
    (tree / "fla/ops/quasar/chunk.py").rename(elsewhere / "chunk.py")
    (tree / "fla/ops/quasar/chunk.py").touch()
    error = fails(tree)
    assert error.kind == "gate"
    assert f"loaded from {elsewhere}" in error.reason


def test_the_first_missing_file_is_named(tmp_path: Path) -> None:
    error = fails(tmp_path)
    assert error.kind == "protocol"
    assert "has no fla/ops/quasar/chunk.py" in error.reason


def test_row_16_the_worker_dies_with_a_killed_parent(make_tree: Any, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    tree = make_tree(
        f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(3600)"
    )
    code = (
        "from pathlib import Path; from harness.measuring.runner import Options, measure;"
        f"measure(Path({str(tree)!r}), 16, Options('cpu'), cross_check=False)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    wait_for(lambda: pid_file.exists() and pid_file.read_text())
    worker = int(pid_file.read_text())
    assert is_alive(worker)
    parent.kill()
    parent.wait()
    wait_for(lambda: not is_alive(worker))


def test_a_worker_whose_parent_is_gone_does_nothing() -> None:
    job = '{"task": "probe", "result_fd": 9, "nonce": "n", "parent": 1}'
    assert run_python("-m", "harness.worker", input=job).returncode == 3


# ---- the environment -------------------------------------------------------------------------


def test_a_workers_environment_is_an_allow_list(tmp_path: Path) -> None:
    allowed = {
        "PATH": "/bin",
        "HOME": "/h",
        "CUDA_VISIBLE_DEVICES": "1",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "OMP_NUM_THREADS": "2",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "QUASAR_NVRTC": "/n",
        "TRITON_CACHE_DIR": "/t",
    }
    tokens = ("GITHUB_TOKEN", "NVIDIA_API_KEY", "CUDA_TOKEN", "AWS_SECRET_ACCESS_KEY")
    others = ("QUASAR_BACKEND", "GITHUB_USERNAME", "PYTHONPATH", "LD_PRELOAD")
    environ = allowed | dict.fromkeys((*tokens, *others), "canary")
    env = child_environment(environ, device="cuda")
    assert "canary" not in env.values()
    assert allowed.items() <= env.items()
    assert child_environment(environ, device="cpu")["CUDA_VISIBLE_DEVICES"] == ""
    cold = child_environment(environ, device="cuda", cache=tmp_path)
    caches = [cold[n] for n in ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME")]
    assert all(Path(cache).parent == tmp_path for cache in caches)


# ---- identifying the code --------------------------------------------------------------------


def test_the_digest_covers_contents_and_names_but_no_byte_code(make_tree: Any) -> None:
    tree = make_tree()
    first = source_digest(tree)
    (tree / "fla/__pycache__").mkdir()
    (tree / "fla/__pycache__/x.pyc").write_bytes(b"x")
    (tree / "outside").touch()
    assert source_digest(tree) == first
    layer = tree / "fla/layers/quasar.py"
    layer.write_text(layer.read_text() + "\n")
    second = source_digest(tree)
    layer.rename(layer.with_name(os.fsdecode(b"quasar\xff.py")))
    assert len({first, second, source_digest(tree)}) == 3


def test_the_commit_is_read_without_running_programs_of_the_checkout(make_tree, tmp_path):
    tree, ran, hook = make_tree(), tmp_path / "ran", tmp_path / "hook.sh"
    hook.write_text(f"#!/bin/sh\ntouch {ran}\n")
    hook.chmod(0o755)
    assert tree_commit(tree) is None
    run_git(tree, "init", "-q")
    head = commit(tree)
    run_git(tree, "config", "core.fsmonitor", str(hook))
    assert tree_commit(tree) == head
    (tree / "fla/layers/quasar.py").write_text("changed")
    assert tree_commit(tree) == f"{head}-dirty"
    assert not ran.exists()


@pytest.mark.parametrize(
    ("reason", "kind", "remedy"),
    [
        ("no \x1b[31mCUDA\x1b[0m", "crash", ""),
        ("a.py needs evil, which is not installed", "import", "Install that module"),
        ("a.py needs einops, which is not installed", "import", "Run "),
    ],
)
def test_a_remedy_contains_no_text_of_the_subject(reason: str, kind: str, remedy: str) -> None:
    reply = {"nonce": "n", "failure": kind, "reason": reason}
    ended = Ended(1, json.dumps(reply).encode() + b"\n", "")
    with pytest.raises(MeasurementError) as caught:
        read_reply(ended, "n", 1.0)
    error = caught.value
    assert error.reason.isprintable()
    assert error.remedy.startswith(remedy)
    assert bool(error.remedy) == bool(remedy)
    assert "evil" not in error.remedy


def test_without_a_temporary_folder_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose file system is read-only."""

    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", none)
    with pytest.raises(MeasurementError, match="temporary files") as caught:
        probe()
    assert "TMPDIR" in caught.value.remedy
    with pytest.raises(MeasurementError, match="temporary files"), whole_tree(OVERLAY):
        pass


def test_a_full_temporary_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(MeasurementError, match="cannot be copied") as caught, whole_tree(OVERLAY):
        pass
    assert "TMPDIR" in caught.value.remedy
