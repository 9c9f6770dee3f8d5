"""The demonstration over several seeds: what compression does to the test scores.

    python benchmarks/demo_seeds.py --seeds 1 2 3 4 5 --output docs/performance/demo_seeds.json

Runs ``flowtt demo`` once per seed and collects the summaries.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from environment import describe_run
from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("fbgemm", "flowtt")


def run_demo(seed: int, device: str, nproc: int, overrides: list[str]) -> dict[str, Any]:
    """The summary of one demonstration."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torchrec_flowtt.train.demo"]
        command += ["--run-dir", folder + "/demo", "--device", device]
        command += ["--nproc-per-node", str(nproc), f"seed={seed}", *overrides]
        subprocess.run(command, cwd=ROOT, check=True)
        summary: dict[str, Any] = json.loads((Path(folder) / "demo/summary.json").read_text())
    return {"seed": seed, **summary}


def main() -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--nproc-per-node", type=int, default=2)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("overrides", nargs="*", help="key=value, as for `flowtt demo`")
    arguments = parser.parse_args()
    device, nproc = arguments.device, arguments.nproc_per_node
    runs = [run_demo(seed, device, nproc, arguments.overrides) for seed in arguments.seeds]
    rows = [
        [
            run["seed"],
            *(run[kind][key] for key in ("test_auc", "test_log_loss") for kind in KINDS),
            run["flowtt"]["test_auc"] - run["fbgemm"]["test_auc"],
        ]
        for run in runs
    ]
    headers = ["seed", "AUC fbgemm", "AUC flowtt", "log-loss fbgemm", "log-loss flowtt", "AUC +-"]
    print(tabulate(rows, headers, floatfmt=["d", *[".4f"] * 4, "+.4f"]))
    if arguments.output is not None:
        result = {"benchmark": "demo_seeds", **describe_run(), "device": device, "runs": runs}
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
