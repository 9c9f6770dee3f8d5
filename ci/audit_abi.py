"""Checks that libtorchrec_flowtt.so keeps its promise: one binary for every torch from 2.11 on.

Usage: ``python ci/audit_abi.py [--cuda] path/to/libtorchrec_flowtt.so``, on any machine that has
binutils, torch and torch-abi-audit; no GPU is needed, and a CPU-only torch is the harder test.
``--cuda`` also insists that the CUDA kernels are in the library. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

OLDEST_TORCH = (2, 11)
OPERATORS = (
    "tt_embedding_bag",
    "tt_embedding_bag_backward",
    "tt_embedding_bag_weights_grad",
    "tt_embedding_bag_backward_update",
)
# libtorch.so although no symbol of it is used: in CUDA builds of torch it is what leads to the
# library with the CUDA symbols below. Without it they would stay null there.
NEEDED = ("libtorch.so", "libtorch_cpu.so")
FORBIDDEN = ("libtorch_python", "libtorch_cuda", "libc10_cuda", "libcudart", "libcuda.so")
# Defined by CUDA builds of torch alone, so a strong reference would keep the library from loading
# on CPU-only torch.
CUDA_SHIM = (
    "aoti_torch_get_current_cuda_stream",
    "torch_c10_cuda_check_msg",
    "torch_c10_cuda_free_error_msg",
)

LOAD_SCRIPT = """
import json, sys, torch
torch.ops.load_library(sys.argv[1])
names = lambda key: torch._C._dispatch_get_registrations_for_dispatch_key(key)
print(json.dumps({
    "torch": torch.__version__,
    "built_with_cuda": torch.version.cuda is not None,
    "CPU": [n for n in names("CPU") if n.startswith("flowtt::")],
    "CUDA": [n for n in names("CUDA") if n.startswith("flowtt::")],
}))
"""


class AuditError(Exception):
    """A check that failed; the message says what was expected and what was found."""


def run(*command: str) -> str:
    """Standard output of a command.

    Raises:
        AuditError: the command is missing or failed.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise AuditError(f"{command[0]} is not installed") from None
    if done.returncode != 0:
        raise AuditError(f"{command[0]} failed with exit code {done.returncode}: {done.stderr}")
    return done.stdout


def check_dependencies(library: Path) -> str:
    """The dynamic section: libraries needed, none forbidden, no run path."""
    dynamic = run("readelf", "--wide", "--dynamic", str(library))
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    missing = [name for name in NEEDED if name not in needed]
    if missing:
        raise AuditError(f"expected {', '.join(missing)} in DT_NEEDED, got {', '.join(needed)}")
    unwanted = [name for name in needed if name.startswith(FORBIDDEN)]
    if unwanted:
        raise AuditError(f"DT_NEEDED must not hold {', '.join(unwanted)}")
    run_paths = re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.+)\]", dynamic)
    if run_paths:
        raise AuditError(f"expected no RPATH or RUNPATH, got {', '.join(run_paths)}")
    return "needs " + ", ".join(needed)


def dynamic_symbols(library: Path) -> list[tuple[str, str, str]]:
    """(name, binding, section index) of every dynamic symbol, versions cut off."""
    table = run("readelf", "--wide", "--dyn-syms", str(library))
    symbols = []
    for line in table.splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[0].rstrip(":").isdigit():
            symbols.append((fields[7].split("@")[0], fields[4], fields[6]))
    return symbols


def check_cuda_symbols(library: Path, with_cuda: bool) -> str:
    """CUDA symbols of torch are weak; the static CUDA runtime is not exported."""
    symbols = dynamic_symbols(library)
    shim = {name: binding for name, binding, _ in symbols if name in CUDA_SHIM}
    strong = [name for name, binding in shim.items() if binding != "WEAK"]
    if strong:
        raise AuditError(f"expected weak references, got strong ones to {', '.join(strong)}")
    if with_cuda and CUDA_SHIM[0] not in shim:
        raise AuditError(f"expected a weak reference to {CUDA_SHIM[0]}, got none")
    exported = [
        name
        for name, _, section in symbols
        if section != "UND" and re.match(r"(__)?cuda[A-Z]|cu[A-Z]", name)
    ]
    if exported:
        raise AuditError(f"the CUDA runtime must stay private, got exported {exported[:5]}")
    return "weak: " + (", ".join(sorted(shim)) or "none used")


def check_device_code(library: Path, with_cuda: bool) -> str:
    """The GPU code is in the library, when it should be."""
    present = ".nv_fatbin" in run("readelf", "--wide", "--section-headers", str(library))
    if with_cuda and not present:
        raise AuditError("expected GPU code (section .nv_fatbin), got none: built without nvcc?")
    return "GPU code: " + ("yes" if present else "no")


def check_stable_abi(library: Path) -> str:
    """torch-abi-audit finds only symbols of the stable ABI, none newer than OLDEST_TORCH."""
    tool = Path(sys.executable).parent / "torch-abi-audit"  # beside the interpreter, PATH or not
    report = json.loads(run(str(tool), "--json", str(library)))
    (module,) = report["bundled_libs"] + report["extensions"]
    torch_report = module["torch"]
    unstable = torch_report["unstable_symbols"] + torch_report["unknown_shim_symbols"]
    if unstable or not torch_report["stable"]:
        raise AuditError(
            f"expected only symbols of torch's stable ABI, got {unstable or 'none of it'}"
        )
    oldest = torch_report["min_torch_version"]
    if tuple(int(part) for part in oldest.split(".")[:2]) > OLDEST_TORCH:
        newest = ", ".join(torch_report["version_defining_symbols"])
        raise AuditError(f"expected torch 2.11 to be enough, but {newest} needs {oldest}")
    return f"{torch_report['stable_shim_count']} stable symbols, torch >= {oldest}"


def check_loads(library: Path, with_cuda: bool) -> str:
    """A fresh process loads the library and finds every operator's kernels."""
    found = json.loads(run(sys.executable, "-c", LOAD_SCRIPT, str(library)))
    for key in ("CPU", "CUDA") if with_cuda else ("CPU",):
        missing = [name for name in OPERATORS if f"flowtt::{name}" not in found[key]]
        if missing:
            raise AuditError(f"expected {key} kernels of all operators, none for {missing}")
    kind = "a CUDA build" if found["built_with_cuda"] else "CPU only"
    return f"loads under torch {found['torch']} ({kind})"


def main() -> int:
    """Runs every check, prints one line for each, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("--cuda", action="store_true", help="insist on the CUDA kernels")
    arguments = parser.parse_args()
    library: Path = arguments.library.resolve()
    if not library.is_file():
        print(f"FAIL  {library}: no such file", file=sys.stderr)
        return 1

    checks: dict[str, Callable[[], str]] = {
        "dependencies": lambda: check_dependencies(library),
        "CUDA symbols": lambda: check_cuda_symbols(library, arguments.cuda),
        "device code": lambda: check_device_code(library, arguments.cuda),
        "stable ABI": lambda: check_stable_abi(library),
        "loading": lambda: check_loads(library, arguments.cuda),
    }
    print(f"Auditing {library}")
    failures = 0
    for name, check in checks.items():
        try:
            print(f"  ok    {name:13} {check()}")
        except AuditError as error:
            failures += 1
            print(f"  FAIL  {name:13} {error}")
    print(f"{failures} of {len(checks)} checks failed" if failures else "All checks passed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
