from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
RUN = ["--device", "cpu", "--repetitions", "2", "--index-sets", "2", "--phases", "training"]
SMALL = ["--num-embeddings", "990", "--p-shapes", "9", "10", "11", "--batch-size", "32"]
OPTIMIZERS = {
    "adagrad": "exact_adagrad",
    "row_wise_adagrad": "exact_row_wise_adagrad",
    "adam": "adam",
}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark itself; its neighbours are imported as they are for the script."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("lookup")


def measure(
    module: ModuleType, folder: Path, contenders: Sequence[str], workload: str = "W1"
) -> tuple[int, list[dict[str, Any]]]:
    """Exit status and records."""
    output = folder / "lookup.json"
    arguments = [*RUN, *SMALL, "--workloads", workload, "--contenders", *contenders]
    status = module.main([*arguments, "--output", str(output)])
    return status, json.loads(output.read_text())


@pytest.mark.parametrize(
    "workload", ["W1:weighted=true", "W6p:tables=2,pooling=mean,pooling_factor=3"]
)
def test_every_optimizer_passes_its_check_and_is_timed(
    workload: str, module: ModuleType, tmp_path: Path
) -> None:
    contenders = [f"flowtt_{name}" for name in OPTIMIZERS]
    contenders += ["fbgemm_adagrad", "fbgemm_row_wise_adagrad"]  # it has no Adam on the CPU
    status, records = measure(module, tmp_path, contenders, workload)
    assert status == 0
    expected = [(f"flowtt_{name}", p) for name in OPTIMIZERS for p in ("fp32", "tf32")]
    expected += [(name, "fp32") for name in contenders[3:]]
    assert [(r["contender"], r["precision"]) for r in records] == expected
    for record in records:
        assert record["optimizer"] == OPTIMIZERS[record["contender"].partition("_")[2]]
        assert record["phase"] == "training" and record["failure"] is None
        assert record["p50_us"] > 0 and 0 < record["relative_error"] < 3e-6


@pytest.mark.parametrize("wrong", ["skipped", "doubled", "eps", "state", "not fresh"])
@pytest.mark.parametrize(
    "contender",
    [
        "flowtt_adagrad/tf32",
        "flowtt_row_wise_adagrad/tf32",
        "flowtt_adam/tf32",
        "fbgemm_adagrad/fp32",
        "fbgemm_row_wise_adagrad/fp32",
    ],
)
def test_a_wrong_step_is_refused(
    contender: str,
    wrong: str,
    module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    contenders = sys.modules["lookup_contenders"]
    kind = contenders.FlowTT if contender.startswith("flowtt") else contenders.Fbgemm
    lookup, states, set_step, init = kind.__call__, kind.states, kind.set_step, kind.__init__

    def without_a_step(self: Any, batch: Any) -> torch.Tensor:
        return lookup(self, batch).detach().requires_grad_()

    def with_two_steps(self: Any, batch: Any) -> torch.Tensor:
        first, output = lookup(self, batch), lookup(self, batch)
        output.register_hook(lambda grad: first.backward(grad))
        return output

    def with_more_eps(self: Any, learning_rate: float, eps: float) -> None:
        set_step(self, learning_rate, 1.02 * eps)

    def with_other_states(self: Any, batch: Any) -> list[list[torch.Tensor]]:
        return [[*moments[:-1], 1.01 * moments[-1]] for moments in states(self, batch)]

    def after_a_step(self: Any, workload: Any, *arguments: Any) -> None:
        init(self, workload, *arguments)
        batch = sys.modules["lookup_workloads"].draw_batch(workload, 1, torch.device("cpu"))
        lookup(self, batch).sum().backward()

    faults = {
        "skipped": ("__call__", without_a_step),
        "doubled": ("__call__", with_two_steps),
        "eps": ("set_step", with_more_eps),
        "state": ("states", with_other_states),
        "not fresh": ("__init__", after_a_step),
    }
    monkeypatch.setattr(kind, *faults[wrong])
    status, records = measure(module, tmp_path, [contender])
    assert status == 1
    (refused,) = records
    assert f"wrong: {contender} on {refused['workload']}: training has" in refused["failure"]
    assert refused["p50_us"] is None and refused["ratio_to_sgd"] is None


def test_ratios_are_to_sgd_and_to_fbgemm_with_the_same_optimizer(
    module: ModuleType, tmp_path: Path
) -> None:
    _, records = measure(module, tmp_path, ["flowtt/tf32"])
    (with_sgd,) = records
    times = {
        ("flowtt", "tf32"): 100.0,
        ("flowtt", "fp32"): 200.0,
        ("flowtt_adam", "tf32"): 130.0,
        ("flowtt_adam", "fp32"): 220.0,
        ("flowtt_row_wise_adagrad", "tf32"): 110.0,
        ("fbgemm", "fp32"): 50.0,
        ("fbgemm_adam", "fp32"): 65.0,
    }
    named = {**OPTIMIZERS, "": "exact_sgd"}
    records = [
        {
            **with_sgd,
            "contender": contender,
            "precision": precision,
            "optimizer": named[contender.partition("_")[2]],
            "p50_us": time,
        }
        for (contender, precision), time in times.items()
    ]
    # Other ways of timing are compared with their own.
    records += [
        {**record, "timing": "graph", "p50_us": 10.0}
        for record in records
        if record["precision"] == "tf32" and record["contender"] in ("flowtt", "flowtt_adam")
    ]
    del records[0]["optimizer"]  # as in records from before there were others
    sys.modules["lookup_records"].add_ratios(records)
    keys = ("ratio_to_sgd", "ratio_to_fbgemm", "ratio_to_tf32")
    assert [tuple(record[key] for key in keys) for record in records] == [
        (None, 2.0, 1.0),
        (None, 4.0, 2.0),
        (1.3, 2.0, 1.0),
        (1.1, 3.385, 1.692),
        (1.1, None, 1.0),
        (None, 1.0, None),
        (1.3, 1.0, None),
        (None, None, 1.0),
        (1.0, None, 1.0),
    ]


def test_tables_with_the_state_of_their_optimizer_must_fit(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    state_bytes = sys.modules["lookup_contenders"].state_bytes
    workload = module.WORKLOADS["W6p"]
    found = {
        mode.contender: state_bytes(workload, mode)
        for mode in module.select_modes(module.DEFAULT_MODES)
    }
    rows, parameters = 8 * 10_000_000, workload.tables * workload.spec.num_parameters
    assert found["flowtt"] == found["fbgemm"] == 0
    assert found["fbgemm_row_wise_adagrad"] == 4 * rows
    assert found["fbgemm_adam"] == 2 * found["fbgemm_adagrad"] == 2 * 4 * 64 * rows
    assert found["flowtt_row_wise_adagrad"] == 4 * 8 * (200 + 220 + 250)
    assert found["flowtt_adam"] == 2 * found["flowtt_adagrad"] == 2 * 4 * parameters
    (adam,) = module.select_modes(["fbgemm_adam"])
    card = type("Card", (), {"total_memory": 40 * 2**30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    obstacle, cuda = sys.modules["lookup_run"].obstacle, torch.device("cuda")
    assert "bytes of tables and optimizer state" in obstacle(workload, adam, cuda)
    (sgd,) = module.select_modes(["fbgemm/fp32"])
    assert obstacle(workload, sgd, cuda) == ""
