"""The compilation by NVRTC: the cache on disk, errors in one line, no toolkit headers.

Tests that compile need NVRTC, which the extra `dev` installs.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import pytest
import torch
from elftools.elf.elffile import ELFFile
from fla.ops.quasar import cache, switches
from fla.ops.quasar.cuda import driver, nvrtc
from fla.ops.quasar.cuda.scan import scan_backward as cuda_scan_bwd
from fla.ops.quasar.cuda.scan import scan_forward as cuda_scan
from fla.ops.quasar.cuda.scan import slice_forward as cuda_slice
from fla.ops.quasar.layer import hopper, portable

from benchmarks.resources import cache as developer_cache
from quasar_kernels.blocks.wkv6_cuda import launch as wkv6
from quasar_kernels.delta_rule.kda_cuda import launch as kda

HOPPER = (9, 0)


def is_missing():
    try:
        nvrtc.load_library()
    except nvrtc.CudaUnavailableError:
        return True
    return False


needs_nvrtc = pytest.mark.skipif(is_missing(), reason="NVRTC is not installed")
KERNEL = 'extern "C" __global__ void quasar_kernel() {}'


@pytest.fixture
def compilations(monkeypatch, tmp_path):
    """An empty cache; the returned list receives the flags of each compilation."""
    compile_one, calls = nvrtc._compile, []
    monkeypatch.setattr(nvrtc, "_compile", lambda *x: calls.append(x[-1]) or compile_one(*x))
    monkeypatch.setenv(switches.CACHE_DIR, str(tmp_path / "cache"))
    return calls


def compile_program(program=KERNEL, capability=HOPPER, options=(), headers=None):
    return nvrtc.compile_cached("program", program, headers or {}, capability, options)


def entries():
    return sorted(cache.cache_folder().iterdir())


@needs_nvrtc
def test_a_program_is_compiled_again_only_after_a_change(compilations, monkeypatch):
    code = compile_program()
    assert b"quasar_kernel" in code
    assert compile_program() == code
    for n, change in enumerate(
        (
            {},
            {"program": KERNEL.replace("kernel", "other")},
            {"capability": (8, 0)},
            {"options": ("-DX",)},
            {"headers": {"a.cuh": "text"}},
        ),
        1,
    ):
        compile_program(**change)
        assert len(compilations) == len(entries()) == n, change
    monkeypatch.setattr(nvrtc, "_version", lambda library: (99, 0))  # another compiler
    compile_program()
    assert len(compilations) == len(entries()) == 6


@needs_nvrtc
@pytest.mark.parametrize("capability", [(9, 0), (99, 0)], ids=["machine code", "PTX"])
def test_a_kernel_is_looked_for_in_its_part_only(capability):
    names = ["quasar_a_map_bf16", "quasar_a_bf16", "quasar_map"]
    parts = [
        nvrtc.compile_cached(
            "part",
            f'extern "C" {{ __global__ void {x}() {{}} __device__ int {x}_launch; }}',
            {},
            capability,
        )
        for x in names
    ]
    assert [driver.part_with(name, parts) for name in reversed(names)] == [2, 1, 0]


@needs_nvrtc
def test_gradients_compiled_in_parallel_have_the_same_machine_code(monkeypatch, tmp_path):
    codes, options = [], ("-DQUASAR_READ_STEP",)
    for parallel in (False, True):
        monkeypatch.setattr(cuda_scan_bwd.PROGRAM, "_parallel", parallel)
        monkeypatch.setenv(switches.CACHE_DIR, str(tmp_path / str(parallel)))
        parts = cuda_scan_bwd.PROGRAM.compile(HOPPER, "bf16", options)
        assert len(parts) == (4 if parallel else 1)
        sections = [x for part in parts for x in ELFFile(BytesIO(part)).iter_sections()]
        codes.append({x.name: x.data() for x in sections if x.name.startswith(".text")})
    assert len(codes[0]) == 5
    assert codes[0] == codes[1]


@needs_nvrtc
@pytest.mark.parametrize("length", [-1, 32], ids=["cut", "no code"])
def test_a_damaged_entry_is_compiled_again(compilations, length):
    code = compile_program()
    (path,) = entries()
    whole = path.read_bytes()
    path.write_bytes(whole[:length])
    assert compile_program() == code
    assert len(compilations) == 2
    assert path.read_bytes() == whole


@needs_nvrtc
def test_without_a_writable_cache_programs_are_compiled(compilations, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(switches.CACHE_DIR, str(tmp_path / "file" / "cache"))
    assert compile_program() == compile_program()
    assert len(compilations) == 2


def test_concurrent_writers_leave_one_complete_entry(monkeypatch, tmp_path):
    monkeypatch.setenv(switches.CACHE_DIR, str(tmp_path))
    code = bytes(range(256)) * 4000
    path = cache.cache_folder() / "entry"
    with ThreadPoolExecutor(8) as pool:
        content = hashlib.sha256(code).digest() + code
        futures = [pool.submit(cache.write_whole, path, content) for _ in range(32)]
        results = [nvrtc._read(path) for _ in range(200)]
        for future in futures:
            future.result()
    assert nvrtc._read(path) == code
    assert set(results) <= {code, None}
    assert entries() == [path]


@needs_nvrtc
@pytest.mark.usefixtures("compilations")
def test_a_compilation_error_is_reported_in_one_line():
    with pytest.raises(nvrtc.CudaUnavailableError) as caught:
        compile_program("#warning x\nno such thing")
    assert "NVRTC could not compile program: program.cu(2): error: " in str(caught.value)
    assert "; remedy: " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not cache.cache_folder().exists()


@pytest.mark.parametrize(
    ("capability", "target"),
    [((8, 0), "sm_80"), ((9, 0), "sm_90a"), ((12, 0), "compute_90"), ((8, 6), "compute_80")],
)
def test_a_gpu_that_nvrtc_does_not_support_gets_ptx(capability, target):
    assert nvrtc.target_for(capability, [80, 89, 90]) == target


def test_a_gpu_older_than_all_supported_ones_is_refused():
    with pytest.raises(nvrtc.CudaUnavailableError, match="install a torch build"):
        nvrtc.target_for((7, 0), [75, 80])


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("cuModuleLoadData: CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "driver"),
        ("cuModuleLoadData: CUDA_ERROR_NO_BINARY_FOR_GPU", "torch build"),
        ("nvrtc: error: invalid value for --gpu-architecture (-arch)", "torch build"),
        ("nvrtc: error: failed to open libnvrtc-builtins.so.13.0", "nvidia-cuda-nvrtc"),
        ('error: could not open source file "fragments.cuh"', "csrc"),
        ('error: cannot open source file "chunk.cuh"', "csrc"),
        ("fatal: Out of memory", "free memory"),
        ("something new", "QUASAR_BACKEND=triton"),
    ],
)
def test_known_failures_have_a_remedy(text, remedy):
    assert remedy in nvrtc.remedy_for(text)


@pytest.fixture
def no_toolkit(monkeypatch):
    """Remove all compilers from PATH; NVRTC's results are cached between runs."""
    monkeypatch.setenv(switches.CACHE_DIR, str(developer_cache.folder() / "nvrtc"))
    monkeypatch.setenv("PATH", "/nonexistent")


FORWARD = cuda_scan.PROGRAM, ("segment_output",)
GRADIENTS = (
    cuda_scan_bwd.PROGRAM,
    ("state_checkpoint", "state_gradient_map", "state_gradient", "input_gradient"),
)
SLICES = cuda_slice.PROGRAM, ("slice_map", "fold_maps", "enter_states")
WKV6 = wkv6.PROGRAM, ("wkv6_forward", "wkv6_backward")
KDA = kda.PROGRAM, ("kda_chunk",)
LAYER = hopper.PROGRAM, ("pack_weights", "projection", "gated_output")
PORTABLE_LAYER = (portable.PROGRAM, ("pack_weights", "resident_projection", "resident_output"))


@needs_nvrtc
@pytest.mark.usefixtures("no_toolkit")
@pytest.mark.parametrize(
    ("programs", "capability", "dtype", "options"),
    [
        # each program once: benchmarks.resources.compile compiles the files for every GPU by nvcc
        (FORWARD, HOPPER, "fp16", ()),
        (GRADIENTS, HOPPER, "bf16", cuda_scan.options_for(128)),
        (GRADIENTS, (8, 0), "bf16", ("-DQUASAR_DECAY",)),
        (SLICES, (8, 0), "bf16", ("-DQUASAR_HEAD=128",)),
        (LAYER, HOPPER, "bf16", ()),
        (PORTABLE_LAYER, (8, 9), "bf16", ()),
        (KDA, (8, 0), "bf16", ("-DQUASAR_HEAD=128",)),
        (WKV6, HOPPER, "fp16", wkv6.variant_for(0, torch.float16, 128).options),
    ],
)
def test_nvrtc_compiles_the_sources_without_headers(programs, capability, dtype, options):
    program, kernels = programs
    parts = program.compile(capability, dtype, options)
    assert all(part.startswith(b"\x7fELF") for part in parts)
    no_dtype = wkv6.PROGRAM, cuda_slice.PROGRAM  # whose kernels' names contain no dtype
    suffix = "" if program in no_dtype else f"_{dtype}"
    for name in kernels:
        assert f"quasar_{name}{suffix}".encode() in b"".join(parts)
