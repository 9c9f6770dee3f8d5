"""Compiles the CUDA kernels for the CPU, into a library with operators of their own.

A tree of the sources is written to build/cuda_on_cpu, in which the headers of ``replaced`` take the
places of those that hold PTX, and three constructs that C++ does not have are rewritten. Files are
compiled again only when something that they include has changed.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "cuda_on_cpu"
SOURCES = BUILD / "csrc"
NAMESPACE = "flowtt_cuda_on_cpu"

# Registration under a name of its own, so that the operators of the package stay what they are.
_REGISTRATION = (
    "STABLE_TORCH_LIBRARY_IMPL(flowtt, CUDA,",
    f"STABLE_TORCH_LIBRARY_IMPL({NAMESPACE}, CPU,",
)
_REWRITES = [
    (
        re.compile(r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+?) (\w+)\[\];"),
        r"\1* const \2 = cuda_on_cpu::dynamic_shared<\1>();",
    ),
    (
        re.compile(r"__shared__ ([\w:<>, ]+?) (\w+)((?:\[[^\]]+\])*);"),
        r"auto& \2 = cuda_on_cpu::static_shared<\1\3>([] {});",
    ),
    (
        re.compile(r"(\w+(?:<\w+>)?)<<<(.+?)>>>\(", re.DOTALL),
        r"cuda_on_cpu::launch(\1, \2)(",
    ),
]
_LEFT_OVER = re.compile(r"__shared__|<<<|\basm\b")


def rewritten(source: str, name: str) -> str:
    """CUDA C++ as C++; raises ValueError for what this module does not know."""
    source = source.replace(*_REGISTRATION)
    for pattern, replacement in _REWRITES:
        source = pattern.sub(replacement, source)
    code = re.sub(r"//.*", "", source)
    if left := _LEFT_OVER.search(code):
        raise ValueError(f"{name}: '{left.group()}' has no counterpart on the CPU")
    return source


def _write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _write_sources() -> list[Path]:
    """Writes the tree; returns what is to be compiled, what takes longest first."""
    csrc = ROOT / "csrc"
    names = [
        *csrc.glob("*.h"),
        *csrc.glob("cuda/*"),
        *(csrc / f"{name}.cpp" for name in ("arguments", "packed_cores", "tiled_features")),
        csrc / "bindings_cuda.cpp",
    ]
    written = set()
    for path in names:
        name = path.relative_to(csrc)
        replacement = HERE / "replaced" / name
        text = (
            replacement.read_text()
            if replacement.exists()
            else rewritten(path.read_text(), str(name))
        )
        _write_if_changed(SOURCES / name, text)
        written.add(SOURCES / name)
    for old in SOURCES.rglob("*.*"):
        if old.is_file() and old not in written:
            old.unlink()
    units = [path for path in written if path.suffix in (".cu", ".cpp")]
    return sorted([*units, *(HERE / "runtime").glob("*.cpp")], key=_expected_seconds, reverse=True)


def _expected_seconds(unit: Path) -> float:
    """From the last time, so that no long compilation is left for the end."""
    times = BUILD / "objects" / f"{unit.stem}.seconds"
    return float(times.read_text()) if times.exists() else 0.0


@functools.cache
def _torch_dir() -> str:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations is not None
    return spec.submodule_search_locations[0]


def _flags() -> list[str]:
    return [
        *("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-w"),
        "-DFLOWTT_GROUPED_BACKWARD",
        *("-DTORCH_TARGET_VERSION=0x020b000000000000", f"-I{HERE / 'runtime'}", f"-I{SOURCES}"),
        *("-isystem", f"{_torch_dir()}/include"),
    ]


def _dependencies(depfile: Path) -> Iterator[Path]:
    """Files of this repository that a unit includes; torch's are as old as the environment."""
    text = depfile.read_text().split(":", 1)[1].replace("\\\n", " ")
    return (Path(name) for name in text.split() if Path(name).is_relative_to(ROOT))


def _digest(compiler: str, depfile: Path) -> str:
    digest = hashlib.sha256(" ".join([compiler, *_flags()]).encode())
    for path in _dependencies(depfile):
        digest.update(path.read_bytes() if path.exists() else b"missing")
    return digest.hexdigest()


def _compile(unit: Path, compiler: str) -> Path:
    object_file = BUILD / "objects" / f"{unit.stem}.o"
    depfile = object_file.with_suffix(".d")
    stamp = object_file.with_suffix(".sha256")
    if object_file.exists() and stamp.exists() and stamp.read_text() == _digest(compiler, depfile):
        return object_file
    stamp.unlink(missing_ok=True)
    command = [compiler, *_flags(), "-MMD", "-MF", str(depfile), "-x", "c++"]
    started = os.times().elapsed
    subprocess.run([*command, "-c", str(unit), "-o", str(object_file)], check=True)
    object_file.with_suffix(".seconds").write_text(f"{os.times().elapsed - started:.1f}")
    stamp.write_text(_digest(compiler, depfile))
    return object_file


@functools.cache
def library() -> Path:
    """The library, compiled if it has to be; two processes do not compile at the same time."""
    (BUILD / "objects").mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CXX", "g++")
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        units = _write_sources()
        with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), 8)) as pool:
            objects = list(pool.map(lambda unit: _compile(unit, compiler), units))
        newest = max(path.stat().st_mtime_ns for path in objects)
        target = BUILD / f"cuda_on_cpu_{newest}.so"
        if not target.exists():
            for old in BUILD.glob("*.so"):
                old.unlink()
            torch_libraries = [
                f"-L{_torch_dir()}/lib",
                "-Wl,--no-as-needed",
                "-ltorch",
                "-ltorch_cpu",
            ]
            command = [compiler, "-shared", *map(str, objects), *torch_libraries]
            subprocess.run([*command, "-o", str(target)], check=True)
    return target


if __name__ == "__main__":
    print(library())
