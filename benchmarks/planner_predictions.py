"""Times that the planner predicts beside those that were measured.

    python benchmarks/planner_predictions.py docs/performance/h200

Reads the folder's ``lookup.json`` and ``lookup_times.json``, writes ``planner.json`` and draws a
page of it, the folder's name with ``_planner.md``. Needs no GPU. Predictions are those of the
planner's estimators, for one device and the workloads of ``lookup.json``, none of which was fitted
to.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lookup_workloads import WORKLOADS, Workload
from tabulate import tabulate
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_flowtt.distributed import (
    FlowTTEmbeddingBagCollection,
    FlowTTEmbeddingBagCollectionSharder,
    FlowTTEmbeddingBagConfig,
)
from torchrec_flowtt.planner import Calibration, FlowTTEmbeddingEnumerator, TTLookupCost
from torchrec_flowtt.planner.calibrate import (
    accuracy,
    fitted,
    predictions,
    read_measurements,
)

_KERNELS = {"flowtt": "customized_kernel", "fbgemm": "fused"}


def predicted_us(
    workload: Workload, contender: str, calibration: Calibration, precision: str, topology: Topology
) -> tuple[float, float]:
    """Microseconds of a workload's forward and backward passes, by the planner's estimators."""
    shape = {
        "num_embeddings": workload.num_embeddings,
        "embedding_dim": workload.embedding_dim,
    }
    tt_shape = {
        "tt_ranks": workload.tt_ranks,
        "p_shapes": workload.spec.p_shapes,
        "q_shapes": workload.spec.q_shapes,
    }
    tables = []
    for i in range(workload.tables):
        names = {"name": f"t{i}", "feature_names": [f"f{i}"]}
        if contender == "flowtt":
            tables.append(FlowTTEmbeddingBagConfig(**names, **shape, **tt_shape))
        else:
            tables.append(EmbeddingBagConfig(**names, **shape))
    constraints = {
        table.name: ParameterConstraints(
            sharding_types=["table_wise"],
            pooling_factors=[float(workload.pooling_factor)],
            compute_kernels=[_KERNELS[contender]],
        )
        for table in tables
    }
    cost = TTLookupCost(
        calibration=calibration,
        precision=precision,
        ids="zipf" if workload.alpha else "uniform",
    )
    enumerator = FlowTTEmbeddingEnumerator(topology, workload.batch_size, constraints, cost=cost)
    options = enumerator.enumerate(
        FlowTTEmbeddingBagCollection(device="meta", tables=tables),
        [FlowTTEmbeddingBagCollectionSharder()],
    )
    perfs = [option.shards[0].perf for option in options]
    if len(perfs) != workload.tables:
        raise ValueError(f"{workload.name}: expected one option a table, got {len(options)}")
    return (
        1e3 * sum(perf.fwd_compute for perf in perfs),
        1e3 * sum(perf.bwd_compute for perf in perfs),
    )


def measured_us(records: list[dict], workload: str, contender: str, precision: str) -> list[float]:
    """Microseconds of a forward pass and of a training step with SGD."""
    found = []
    for phase in ("forward", "training"):
        (record,) = (
            r
            for r in records
            if r["workload"] == workload
            and (r["contender"], r["precision"], r["phase"]) == (contender, precision, phase)
            and r["timing"] == "graph"
            and not r["cold"]
        )
        found.append(record["p50_us"])
    return found


def compare(folder: Path) -> dict[str, object]:
    """All predictions."""
    measurements = read_measurements(folder / "lookup_times.json")
    calibration = fitted(measurements)
    records = json.loads((folder / "lookup.json").read_text())
    known = {"default": None, "calibrated": calibration.fbgemm_bytes_per_ms}
    rows = []
    for name, workload in WORKLOADS.items():
        for contender, precision in (("flowtt", "tf32"), ("flowtt", "fp32"), ("fbgemm", "fp32")):
            measured = measured_us(records, name, contender, precision)
            for bandwidth, bytes_per_ms in known.items():
                if contender == "flowtt" and bandwidth == "default":
                    continue
                given = {} if bytes_per_ms is None else {"hbm_mem_bw": bytes_per_ms}
                topology = Topology(world_size=1, compute_device="cuda", **given)
                forward, backward = predicted_us(
                    workload, contender, calibration, precision, topology
                )
                rows.append(
                    {
                        "workload": name,
                        "contender": contender,
                        "precision": precision,
                        "bandwidth": bandwidth,
                        "forward_us": measured[0],
                        "predicted_forward_us": round(forward, 2),
                        "training_us": measured[1],
                        "predicted_training_us": round(forward + backward, 2),
                    }
                )
    return {
        "card": calibration.card,
        "calibrated": calibration.run,
        "measured": records[0]["run"],
        "fbgemm_bytes_per_ms": calibration.fbgemm_bytes_per_ms,
        "workloads": rows,
        "random_tables": {
            "tables": len(measurements.checks),
            **{
                phase: {**of_phase._asdict(), "median_error": round(of_phase.median_error, 3)}
                for phase, of_phase in accuracy(
                    predictions(calibration, measurements.checks)
                ).items()
            },
        },
    }


def page(found: dict) -> str:
    """The comparison as Markdown."""
    lines = []
    for row in found["workloads"]:
        contender = f"TT, {row['precision']}" if row["contender"] == "flowtt" else "FBGEMM"
        if row["bandwidth"] == "default":
            contender += ", default bandwidth"
        cells = [row["workload"], contender]
        for phase in ("forward", "training"):
            measured, predicted = row[f"{phase}_us"], row[f"predicted_{phase}_us"]
            cells += [f"{measured:.1f}", f"{predicted:.1f} ({predicted / measured - 1:+.0%})"]
        lines.append(cells)
    headers = ["workload", "tables", "forward, us", "predicted", "training, us", "predicted"]
    table = tabulate(lines, headers=headers, tablefmt="pipe", disable_numparse=True)
    checks = found["random_tables"]
    return "\n\n".join(
        [
            f"# Predicted by the planner: {found['card']}",
            "`make performance` draws this page. Measured are the workloads of "
            "[the lookup benchmark](h200.md) (graph, warm, SGD); predicted are compute times of "
            "`FlowTTEmbeddingShardingPlanner` for one device. TT lookups have the calibration that "
            f"comes with the package (`{found['calibrated']['command']}`, "
            f"{found['calibrated']['date'][:10]}, torch {found['calibrated']['torch']}), with "
            "uniform or Zipf-distributed ids as the workload has them, and with row-wise Adagrad's "
            "step. FBGEMM's are TorchRec's own estimates, with the memory bandwidth that its "
            "`Topology` has by default, and with that which the calibration measured, "
            f"{found['fbgemm_bytes_per_ms'] / 1e9:.2f} GB/ms.",
            table,
            f"Of {checks['tables']} tables and batches that were drawn at random (2 to 4 cores, 16 "
            "to 256 columns, ranks 8 to 128, 256 bags or more) the median error is "
            f"{checks['forward']['median_error']:.0%} forward and "
            f"{checks['backward']['median_error']:.0%} backward; "
            f"{checks['forward']['within_30_percent']} and "
            f"{checks['backward']['within_30_percent']} are within 30%. Those that are not are "
            "mostly tables of two and four cores, and batches of a few thousand lookups.",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares, and writes records and page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    found = compare(folder)
    (folder / "planner.json").write_text(json.dumps(found, indent=1) + "\n")
    written = folder.parent / f"{folder.name}_planner.md"
    written.write_text(page(found) + "\n")
    print(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
