"""Writes registers, shared memory and spills of the CUDA kernels into docs/kernels.md.

    CUDAFLAGS="-Xptxas -v" cmake -S . -B build/report -G Ninja -DFLOWTT_CUDA=ON ...
    cmake --build build/report 2>&1 | tee build/report.log
    python ci/kernel_report.py build/report.log docs/kernels.md

The log may hold what ptxas says of one architecture only. It also reads what ``cuobjdump
--dump-resource-usage LIBRARY`` prints, which has no spills. Kernels that differ in template
arguments alone and need the same are one line.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

BEGIN, END = "<!-- kernel report -->", "<!-- end of kernel report -->"
_OWN_KERNELS = "_ZN6flowtt"
_PTXAS_NAME = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_PTXAS_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill")
_PTXAS_USED = re.compile(r"Used (\d+) registers")
_PTXAS_SHARED = re.compile(r"(\d+) bytes smem")
_DUMP_NAME = re.compile(r"Function (\w+):")
_DUMP_USED = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")


@dataclasses.dataclass(frozen=True)
class Resources:
    """What one kernel needs; shared memory without what is asked for at launch."""

    kernel: str
    registers: int
    shared: int
    stack: int
    spill_stores: int | None
    spill_loads: int | None


def parse(lines: Iterable[str]) -> Iterator[Resources]:
    """The kernels of a log, under their mangled names."""
    kernel, stack = "", (0, 0, 0)
    for line in lines:
        if match := _PTXAS_NAME.search(line):
            kernel = match[1]
        elif match := _PTXAS_STACK.search(line):
            stack = (int(match[1]), int(match[2]), int(match[3]))
        elif kernel and (match := _PTXAS_USED.search(line)):
            shared = _PTXAS_SHARED.search(line)
            yield Resources(kernel, int(match[1]), int(shared[1]) if shared else 0, *stack)
            kernel = ""
        elif match := _DUMP_NAME.search(line):
            kernel = match[1]
        elif kernel and (match := _DUMP_USED.search(line)):
            yield Resources(kernel, int(match[1]), int(match[3]), int(match[2]), None, None)
            kernel = ""


def demangle(names: Sequence[str]) -> list[str]:
    """By c++filt, without namespaces, return type and parameters."""
    result = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    )
    return [shorten(name) for name in result.stdout.splitlines()]


def shorten(name: str) -> str:
    """A demangled kernel's name and template arguments.

    >>> shorten("void flowtt::cuda::tiled_contract_kernel<32, 8, true>(flowtt::Group, int)")
    'tiled_contract<32, 8, true>'
    """
    depth, end = 0, len(name)
    for i, character in enumerate(name):
        depth += {"<": 1, ">": -1}.get(character, 0)
        if character == "(" and depth == 0 and not name.startswith("(anonymous", i):
            end = i
            break
    name = name[:end].removeprefix("void ")
    name = name.replace("(anonymous namespace)::", "")
    name = re.sub(r"\b(flowtt|cuda|at|c10)::", "", name)
    name = re.sub(r"\((?:int|bool|unsigned int|flowtt::\w+)\)", "", name)
    return re.sub(r"_kernel\b", "", name)


def table(kernels: Iterable[Resources]) -> str:
    """In Markdown, one line for kernels of one name that need the same."""
    lines: dict[tuple[object, ...], list[str]] = {}
    for resources in sorted(set(kernels), key=dataclasses.astuple):
        name, _, arguments = resources.kernel.partition("<")
        key = (name, *dataclasses.astuple(resources)[1:])
        lines.setdefault(key, []).append(f"<{arguments}" if arguments else "")
    rows = ["| kernel | registers | shared, bytes | stack | spilled, stored / loaded |"]
    rows.append("| --- | --- | --- | --- | --- |")
    for (name, registers, shared, stack, stores, loads), variants in lines.items():
        label = " ".join(f"`{name}{variant}`" for variant in variants[:3])
        label += f" and {len(variants) - 3} more" if len(variants) > 3 else ""
        spills = "–" if stores is None else "0" if stores == loads == 0 else f"{stores} / {loads}"
        rows.append(f"| {label} | {registers} | {shared:,} | {stack} | {spills} |")
    return "\n".join(rows)


def main(arguments: Sequence[str]) -> int:
    """Replaces the report in a page."""
    log, page = map(Path, arguments)
    every = parse(log.read_text().splitlines())
    # Those of libraries are not ours to report.
    found = [resources for resources in every if resources.kernel.startswith(_OWN_KERNELS)]
    if not found:
        print(f"{log}: no kernel in it; was it built with -Xptxas -v?", file=sys.stderr)
        return 1
    names = demangle([resources.kernel for resources in found])
    kernels = [dataclasses.replace(r, kernel=name) for r, name in zip(found, names, strict=True)]
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{table(kernels)}\n\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
