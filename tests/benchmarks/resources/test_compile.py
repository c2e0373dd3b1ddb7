"""The compilation of every kernel: the resources in machine code, the limits, and the cache."""

from __future__ import annotations

import importlib
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import triton
import triton.language as tl

from benchmarks.resources import compile as compile_kernels
from benchmarks.resources import table as kernel_resources
from benchmarks.resources.compile import (
    compile_all,
    compile_cuda,
    compile_triton,
    find_nvcc,
    is_quick,
    specs_for,
)
from benchmarks.resources.table import Compiled, Resources
from quasar_kernels.compile_failures import OTHER_GPUS
from quasar_kernels.compile_specs import ARCHITECTURES, CompileSpec, compile_specs
from quasar_kernels.contract import OVERLAY
from quasar_kernels.mount import mount

mount()

CUDA = """\
#include <cuda_bf16.h>
#include <cuda_runtime.h>

extern "C" __global__ void tile_product(const __nv_bfloat16* x, float* y) {
  __shared__ float tile[1024];
  unsigned a[4] = {threadIdx.x, 1, 2, 3}, b[2] = {4, threadIdx.x};
  float c[4] = {};
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  tile[threadIdx.x] = c[0] + __bfloat162float(x[threadIdx.x]);
  __syncthreads();
  y[threadIdx.x] = tile[(threadIdx.x * 7) % 1024] + c[1] + c[2] + c[3];
}
"""


@pytest.fixture
def nvcc() -> Path:
    """The compiler of CUDA sources, which needs another one for the host."""
    found = find_nvcc()
    if found is None or shutil.which("g++") is None:
        pytest.skip("needs nvcc and g++")
    return found


@triton.jit
def tile_product_kernel(x, y, N, BM: tl.constexpr, BK: tl.constexpr):
    rows = tl.arange(0, BM)
    cols = tl.arange(0, BK)
    out = tl.zeros([BM, BM], tl.float32)
    for i in range(N):
        a = tl.load(x + i * BM * BK + rows[:, None] * BK + cols[None, :])
        b = tl.load(y + i * BM * BK + cols[:, None] * BM + rows[None, :])
        out += tl.dot(a, b)
    tl.store(y + rows[:, None] * BM + rows[None, :], out.to(tl.bfloat16))


@triton.jit
def broken_kernel(x, BM: tl.constexpr):
    tl.store(x + tl.arange(0, BM), undefined_name)  # type: ignore[name-defined]  # noqa: F821


def tile_product(depth: int, warps: int, stages: int) -> CompileSpec:
    types, tile = {"x": "*bf16", "y": "*bf16", "N": "i32"}, {"BM": 128, "BK": depth}
    return CompileSpec("tile product", tile_product_kernel, types, tile, warps, stages)


@pytest.fixture
def overlay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder in place of the CUDA sources, and no Triton kernels."""
    monkeypatch.setattr(compile_kernels, "PACKAGE", tmp_path)
    monkeypatch.setattr(compile_kernels, "specs_for", lambda arch: [])
    return tmp_path


LAUNCH = 'extern "C" __constant__ int tile_product_launch[2] = {64, BYTES};\n'


@pytest.mark.parametrize(("arch", "fits"), [(86, False), (90, True)])
def test_dynamic_shared_memory_counts(tmp_path, nvcc, arch, fits):
    source = tmp_path / "tile.cu"
    source.write_text(CUDA + LAUNCH.replace("BYTES", "120000"))
    (row,) = compile_cuda(source, nvcc, arch)
    assert (row.kernel, row.arch) == ("tile.cu: tile_product", arch)
    assert row.needs
    assert 8 <= row.needs.registers <= 255
    assert row.needs.spills == 0
    # from Hopper on, cuobjdump counts the 1 KiB that the system reserves for each block
    assert row.needs.shared == 4096 + 120_000 + (1024 if arch >= 90 else 0)
    assert (row.error == "") == fits
    assert fits or "a block may have 101376" in row.error


HOPPER = """\
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
extern "C" __global__ void after_products() { asm volatile("wgmma.fence.sync.aligned;"); }
#endif
"""


@pytest.mark.usefixtures("nvcc")
def test_a_file_for_one_architecture_has_no_kernel_on_others(overlay):
    (overlay / "bad.cu").write_text('extern "C" __global__ void bad() { no_such_call(); }\n')
    (overlay / "hopper.cu").write_text(HOPPER)
    rows = {(row.kernel, row.arch): row for row in compile_all([90, 80])}
    assert rows["hopper.cu", 80] == Compiled("hopper.cu", 80)  # no kernel, and no error
    hopper = rows["hopper.cu: after_products", 90]  # compiled for sm_90a: sm_90 has no wgmma
    assert hopper.needs
    assert not hopper.error
    assert "no_such_call" in rows["bad.cu", 90].error


def test_a_triton_kernel_must_fit_the_smallest_gpu(overlay, monkeypatch):
    specs = [
        tile_product(128, 8, 3),
        CompileSpec("broken", broken_kernel, {"x": "*fp32"}, {"BM": 64}),
    ]
    monkeypatch.setattr(compile_kernels, "specs_for", lambda arch: specs)
    tile, broken = compile_all([90])
    # two tiles of 128 x 128 bf16 are 64 KiB a stage
    assert tile.needs
    assert tile.needs.shared > 99 * 1024
    assert "a block may have 101376" in tile.error
    assert "undefined_name" in broken.error


def test_spills_are_found() -> None:
    (row,) = compile_triton(tile_product(16, warps=2, stages=1), 80)
    # 128 x 128 fp32 sums are 256 registers in each thread of two warps; 255 is the most
    assert row.needs
    assert row.needs.spills >= 8  # one register, stored and loaded
    assert row.needs.stack >= 4


@pytest.fixture
def compiled(overlay, monkeypatch):
    """Return a function that compiles what is in `overlay` and returns the files it had to compile.

    The compiler is a fake, which fails for a file that contains WRONG.
    """
    log = overlay / "compiled"

    def stand_in(source: Path, nvcc: Path, arch: int) -> list[Compiled]:
        with log.open("a") as file:
            file.write(f"{source.name} {arch}\n")
        if "WRONG" in source.read_text():
            raise RuntimeError("nvcc failed")
        return [Compiled(source.name, arch, Resources(registers=arch))]

    def run(*archs: int, quick: bool = False, keep: bool = True) -> list[str]:
        log.write_text("")
        rows = compile_all(archs or (80,), quick=quick, keep=keep)
        assert all(row.error or row.needs == Resources(registers=row.arch) for row in rows)
        return sorted(log.read_text().splitlines())

    monkeypatch.setenv("XDG_CACHE_HOME", str(overlay / "cache"))
    monkeypatch.setattr(compile_kernels, "compile_cuda", stand_in)
    monkeypatch.setattr(compile_kernels, "find_nvcc", lambda: Path("nvcc"))
    monkeypatch.setattr(kernel_resources, "compiler_versions", lambda nvcc: {"nvcc": "13.0"})
    monkeypatch.setattr(compile_kernels, "sources", lambda: sorted(overlay.glob("*.cu")))
    (overlay / "deep").mkdir()
    (overlay / "deep" / "inner.cuh").write_text("// 1")
    (overlay / "outer.cuh").write_text('#include "deep/inner.cuh"')
    (overlay / "a.cu").write_text('#include "outer.cuh"\n')
    (overlay / "b.cu").write_text("// b")
    return run


def test_unchanged_kernels_are_compiled_once(compiled):
    assert compiled() == ["a.cu 80", "b.cu 80"]
    assert compiled() == []
    assert compiled(80, 90) == ["a.cu 90", "b.cu 90"]
    assert compiled(keep=False) == ["a.cu 80", "b.cu 80"]


def test_a_quick_check_omits_repeated_code(compiled):
    assert compiled(*ARCHITECTURES, quick=True) == ["a.cu 86", "a.cu 90", "b.cu 86", "b.cu 90"]
    names = {arch: {spec.name for spec in specs_for(arch)} for arch in ARCHITECTURES}
    quick = {arch: {n for n in each if is_quick(n, arch)} for arch, each in names.items()}
    assert quick.pop(90) == names[90]
    assert sum(map(bool, quick.values())) == 3
    assert {name for name in names[80] if "bf16" in name} <= set().union(*quick.values())


def test_each_changed_dependency_causes_a_compilation(compiled, overlay, monkeypatch):
    compiled()
    (overlay / "deep" / "inner.cuh").write_text("// 2")
    assert compiled() == ["a.cu 80"]
    (overlay / "b.cu").write_text("// B")
    assert compiled() == ["b.cu 80"]
    versions = {"nvcc": "99.0"}
    monkeypatch.setattr(kernel_resources, "compiler_versions", lambda nvcc: versions)
    assert compiled() == ["a.cu 80", "b.cu 80"]
    monkeypatch.setattr(compile_kernels, "_packages", lambda: ["another header"])
    assert compiled() == ["a.cu 80", "b.cu 80"]


def test_failures_and_damaged_results_are_not_cached(compiled, overlay, monkeypatch):
    (overlay / "b.cu").write_text("// WRONG")
    assert compiled() == ["a.cu 80", "b.cu 80"]
    assert compiled() == ["b.cu 80"]
    (kept,) = (overlay / "cache").rglob("*.json")
    for content in ("", "[]", '[{"kernel": "a.cu"}]'):
        kept.write_text(content)
        assert compiled() == ["a.cu 80", "b.cu 80"]
        assert compiled() == ["b.cu 80"]
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert compiled() == compiled() == ["a.cu 80", "b.cu 80"]


def test_a_triton_kernel_s_digest_depends_on_its_code_and_its_launch() -> None:
    specs = [tile_product(16, 2, 1), tile_product(32, 2, 1), tile_product(16, 4, 1)]
    other = {"kernel": broken_kernel, "signature": {"x": "*fp32"}, "constexprs": {"BM": 64}}
    specs += [tile_product(16, 2, 3), replace(specs[0], **other)]  # type: ignore[arg-type]
    assert len({str(compile_kernels._triton_parts(spec)) for spec in specs}) == len(specs)
    again = tile_product(16, 2, 1)
    assert compile_kernels._triton_parts(again) == compile_kernels._triton_parts(specs[0])


def test_every_kernel_of_the_overlay_is_described() -> None:
    described = {id(spec.kernel) for spec in compile_specs()}
    missing, found = [], 0
    for path in sorted((OVERLAY / "fla/ops/quasar").rglob("*.py")):
        module = importlib.import_module(".".join(path.relative_to(OVERLAY).with_suffix("").parts))
        for name, value in vars(module).items():
            if name.endswith("_kernel") and isinstance(value, triton.JITFunction):
                found += 1
                missing += [f"{path.name}: {name}"] * (id(value) not in described)
    assert found
    assert not missing


def run(monkeypatch: pytest.MonkeyPatch, rows: list[Compiled], *arguments: str) -> int:
    monkeypatch.setattr(compile_kernels, "compile_all", lambda archs, match, **_: rows)
    monkeypatch.setattr("sys.argv", ["compile", *arguments])
    return compile_kernels.main()


def test_the_table_is_written_and_checked(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(kernel_resources, "TABLE", tmp_path / "table.json")
    rows = [Compiled("scan", 86, Resources(64, 0, 0, 8192)), Compiled("scan", 90, Resources(72))]
    assert run(monkeypatch, rows, "--write") == 0
    assert run(monkeypatch, rows, "--check") == 0
    for part in (["--arch", "90"], ["--quick"]):
        assert run(monkeypatch, rows[1:], "--check", *part) == 0
    capsys.readouterr()

    changed = [rows[0], Compiled("scan", 90, Resources(80, 16, 32))]
    assert run(monkeypatch, changed, "--check") == 1
    out = capsys.readouterr().out
    assert "scan, sm_90: registers 72, stack 0, spills 0" in out
    assert "-> registers 80, stack 16, spills 32" in out
    assert kernel_resources.WRITE in out
    assert run(monkeypatch, changed) == 0  # compared only with --check

    with pytest.raises(SystemExit):
        run(monkeypatch, rows, "--write", "--match", "scan")


def test_a_known_failure_comes_with_its_remedy(monkeypatch, capsys):
    text = "RuntimeError: nvcc failed:\nnvcc fatal   : Unsupported gpu architecture 'compute_120'"
    assert run(monkeypatch, [Compiled("scan.cu", 120, error=text)]) == 1
    assert f"scan.cu, sm_120: {OTHER_GPUS.cause}. {OTHER_GPUS.remedy}" in capsys.readouterr().out
