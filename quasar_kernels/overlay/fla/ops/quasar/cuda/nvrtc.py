"""Compile the CUDA kernels at first use with NVRTC, and keep the machine code on disk.

The machine needs torch's CUDA wheels and a driver, nothing else: NVRTC comes with the wheels, and
the sources include no header of the toolkit. Nothing here runs before the first call on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from fla.ops.quasar import switches
from fla.ops.quasar.cache import cache_folder, write_whole

HOPPER = (9, 0)
"""The capability with `wgmma`. Code for its target, sm_90a, runs on no other GPU."""

_DIGEST = hashlib.sha256().digest_size
_INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)

_REMEDIES = (
    ("out of memory", "free memory on the machine, then start again"),
    ("unsupported_ptx_version", "update the GPU's driver: it is older than torch's CUDA"),
    ("no_binary_for_gpu", "install a torch build that supports this GPU"),
    ("--gpu-architecture", "install a torch build that supports this GPU"),
    ("open source file", "restore the csrc folders"),
    ("builtins", "reinstall torch's nvidia-cuda-nvrtc wheel: a part of it is missing"),
)


class CudaUnavailableError(RuntimeError):
    """The CUDA kernels cannot be built or run; `problem` and `remedy` are a clause each."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem = " ".join(problem.split())
        self.remedy = remedy or remedy_for(self.problem)
        super().__init__(f"{self.problem}; remedy: {self.remedy}")


def remedy_for(text: str) -> str:
    """Return the remedy for a failure of NVRTC or the driver, from its message."""
    for part, remedy in _REMEDIES:
        if part in text.lower():
            return remedy
    return "set QUASAR_BACKEND=triton to stop trying, or report the text before this"


def _library_paths() -> Iterator[str]:
    # torch's major version of CUDA first; for each version torch's folder, the wheels, the system
    chosen = switches.nvrtc_library()
    if chosen is not None:
        yield chosen
        return
    own = (torch.version.cuda or "").partition(".")[0]
    majors = [own, *(m for m in ("13", "12") if m != own)] if own else ["13", "12"]
    folders = [str(Path(torch.__file__).parent / "lib")]
    wheels = importlib.util.find_spec("nvidia")
    for root in (wheels.submodule_search_locations or ()) if wheels else ():
        folders += sorted(glob.glob(f"{root}/*/lib"))
    folders += [f"{root}/lib64" for root in (*switches.cuda_toolkits(), "/usr/local/cuda")]
    for major in majors:
        for folder in folders:
            yield from sorted(glob.glob(f"{glob.escape(folder)}/libnvrtc*.so.{major}*"))
        yield f"libnvrtc.so.{major}"  # found by the loader


@functools.cache
def load_library() -> ctypes.CDLL:
    """Return NVRTC, of torch's major version of CUDA if it is installed, otherwise of 13 or 12.

    Raises:
        CudaUnavailableError: it was not found.
    """
    for path in _library_paths():
        if "builtins" in path or ".alt." in path:
            continue
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(path)
            # the compiler opens its built-in functions by name, where the loader may not look
            for part in glob.glob(f"{glob.escape(os.path.dirname(path))}/libnvrtc-builtins.so*"):
                ctypes.CDLL(part)
            library.nvrtcGetErrorString.restype = ctypes.c_char_p
            return library
    raise CudaUnavailableError(
        "NVRTC, CUDA's run-time compiler, was not found",
        f"install nvidia-cuda-nvrtc for CUDA {torch.version.cuda or 'of your torch'}, or name the "
        f"library in {switches.NVRTC}",
    )


def _checked(library: ctypes.CDLL, status: int, what: str) -> None:
    if status:
        raise CudaUnavailableError(f"{what}: {library.nvrtcGetErrorString(status).decode()}")


def _version(library: ctypes.CDLL) -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _checked(library, library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "NVRTC")
    return major.value, minor.value


def target_for(capability: tuple[int, int], supported: Sequence[int]) -> str:
    """Return NVRTC's name of the architecture to compile for.

    If NVRTC supports the GPU, the target is machine code. Otherwise it is PTX for the newest older
    architecture that NVRTC supports, which the driver translates.

    Args:
        capability: (major, minor) of the GPU.
        supported: the supported architectures, as numbers such as 90.
    """
    requested = 10 * capability[0] + capability[1]
    if requested in supported:
        return "sm_90a" if capability == HOPPER else f"sm_{requested}"
    older = [arch for arch in supported if arch < requested]
    if not older:
        raise CudaUnavailableError(f"this NVRTC does not compile --gpu-architecture=sm_{requested}")
    return f"compute_{max(older)}"


def _supported(library: ctypes.CDLL) -> list[int]:
    count = ctypes.c_int()
    _checked(library, library.nvrtcGetNumSupportedArchs(ctypes.byref(count)), "NVRTC")
    archs = (ctypes.c_int * count.value)()
    _checked(library, library.nvrtcGetSupportedArchs(archs), "NVRTC")
    return list(archs)


def compile_cached(
    name: str,
    program: str,
    headers: Mapping[str, str],
    capability: tuple[int, int],
    options: Sequence[str] = (),
) -> bytes:
    """Return the machine code (or PTX, ending in NUL) of a program for a GPU.

    Args:
        name: the stem of the cached file's name, also used in messages.
        program: the source; it may include `headers`.
        headers: the texts of included files, by the name in the include line.
        capability: (major, minor) of the GPU.
        options: further options of NVRTC; architecture and language are set here.

    Raises:
        CudaUnavailableError: NVRTC is missing or does not compile the program.
    """
    library = load_library()
    target = target_for(capability, _supported(library))
    flags = (f"--gpu-architecture={target}", "--std=c++17", *options)
    key = hashlib.sha256(
        repr((_version(library), flags, program, sorted(headers.items()))).encode()
    )
    path = cache_folder() / f"{name}-{target}-{key.hexdigest()[:32]}.bin"
    code = _read(path)
    if code is None:
        code = _compile(library, name, program, headers, flags)
        with contextlib.suppress(OSError):  # without a writable cache, each process compiles
            write_whole(path, hashlib.sha256(code).digest() + code)
    return code


def compile_files(
    name: str, sources: Sequence[Path], capability: tuple[int, int], options: Sequence[str] = ()
) -> bytes:
    """Return the machine code of one program made of the files `sources`.

    The other arguments are those of `compile_cached`.

    Raises:
        CudaUnavailableError: a file cannot be read, NVRTC is missing, or it does not compile the
            program.
    """
    try:
        texts = read_sources(sources)
    except OSError as error:
        raise CudaUnavailableError(
            f"the CUDA sources cannot be read ({error})", "restore the csrc folders"
        ) from error
    program = "".join(f'#include "{path.name}"\n' for path in sources)
    return compile_cached(name, program, texts, capability, options)


def read_sources(paths: Sequence[Path]) -> dict[str, str]:
    """Return the texts of files and of all files that they include, by name.

    An include line has a path relative to the including file. In the returned texts it has only the
    file's name, as NVRTC needs it.
    """
    texts: dict[str, str] = {}
    remaining = list(paths)
    while remaining:
        path = remaining.pop()
        if path.name not in texts:
            text = path.read_text()
            remaining += [path.parent / included for included in _INCLUDE.findall(text)]
            texts[path.name] = _INCLUDE.sub(lambda m: f'#include "{Path(m[1]).name}"', text)
    return texts


def _read(path: Path) -> bytes | None:
    # a digest precedes the code: a file damaged by a crash or a full disk is compiled again
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:_DIGEST], content[_DIGEST:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def _compile(
    library: ctypes.CDLL, name: str, program: str, headers: Mapping[str, str], flags: Sequence[str]
) -> bytes:
    handle = ctypes.c_void_p()
    texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    names = (ctypes.c_char_p * len(headers))(*(key.encode() for key in headers))
    create = library.nvrtcCreateProgram(
        ctypes.byref(handle), program.encode(), f"{name}.cu".encode(), len(headers), texts, names
    )
    _checked(library, create, "NVRTC")
    try:
        options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        status = library.nvrtcCompileProgram(handle, len(flags), options)
        if status:
            log = _fetch(library, handle, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            reason = next((x for x in log.splitlines() if "error" in x.lower()), log[:300])
            reason = reason or library.nvrtcGetErrorString(status).decode()
            raise CudaUnavailableError(f"NVRTC could not compile {name}: {reason}")
        return _fetch(library, handle, "CUBIN" if "=sm_" in flags[0] else "PTX")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(handle))


def _fetch(library: ctypes.CDLL, handle: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _checked(library, getattr(library, f"nvrtcGet{what}Size")(handle, ctypes.byref(size)), what)
    buffer = ctypes.create_string_buffer(size.value)
    _checked(library, getattr(library, f"nvrtcGet{what}")(handle, buffer), what)
    return buffer.raw


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
