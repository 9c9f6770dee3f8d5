"""Steps fused into backward against dense autograd in float64 and the textbook formulas."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchrec_flowtt.functional import to_dense
from torchrec_flowtt.modules import OptimType, TableBatchedFlowTTEmbeddingBags
from torchrec_flowtt.shapes import TTSpec

SPECS = [
    TTSpec(22, 12, (2, 3, 4), (2, 3, 2), (4, 5), name="ads"),
    TTSpec(300, 8, (17, 18), (2, 4), (3,), name="users"),
    TTSpec(15, 8, (2, 2, 2, 2), (2, 2, 1, 2), (2, 3, 2), name="items"),
]
# Feature 2 reads table 0 as feature 0 does, and features are not in the order of their tables.
FEATURES = [0, 2, 0, 1]
FUSED = [optimizer for optimizer in OptimType if optimizer is not OptimType.NONE]
BATCH = 6


def make_batch(seed: int, weighted: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Bags of 0 to 4 rows with many duplicates, feature-major, and weights if asked for."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (len(FEATURES) * BATCH,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    indices = []
    for feature, table in enumerate(FEATURES):
        count = int(lengths[feature * BATCH : (feature + 1) * BATCH].sum())
        # Few distinct ids, so that some slices of each core are never looked up.
        rows = max(2, SPECS[table].num_embeddings // 3)
        indices.append(torch.randint(0, rows, (count,), generator=generator))
    flat = torch.cat(indices)
    weights = torch.rand(flat.numel(), generator=generator) * 2 - 0.5 if weighted else None
    return flat, offsets, weights


def reference_output(
    cores: list[list[Tensor]],
    batch: tuple[Tensor, Tensor, Tensor | None],
    mean: bool,
) -> Tensor:
    """The lookup through reconstructed float64 tables."""
    indices, offsets, weights = batch
    columns = []
    for feature, table in enumerate(FEATURES):
        dense = to_dense(cores[table], SPECS[table].num_embeddings)
        bags = []
        for bag in range(BATCH):
            start, end = offsets[feature * BATCH + bag : feature * BATCH + bag + 2].tolist()
            picked = dense[indices[start:end]]
            if weights is not None:
                picked = picked * weights[start:end, None].double()
            total = picked.sum(0)
            bags.append(total / (end - start) if mean and end > start else total)
        columns.append(torch.stack(bags))
    return torch.cat(columns, 1)


def touched_slices(batch: tuple[Tensor, Tensor, Tensor | None]) -> list[list[Tensor]]:
    """For each table and core, which slices the batch looks up."""
    indices, offsets, _ = batch
    touched = [[torch.zeros(p, dtype=torch.bool) for p in spec.p_shapes] for spec in SPECS]
    for feature, table in enumerate(FEATURES):
        ids = indices[offsets[feature * BATCH] : offsets[(feature + 1) * BATCH]]
        for k in reversed(range(SPECS[table].num_cores)):
            p = SPECS[table].p_shapes[k]
            touched[table][k][ids % p] = True
            ids = ids // p
    return touched


class ReferenceOptimizer:
    """The formulas of FBGEMM's TBE on slices, in float64."""

    def __init__(self, optimizer: OptimType, cores: list[list[Tensor]], **settings: float) -> None:
        self.optimizer, self.cores, self.settings = optimizer, cores, settings
        self.step_number = 0
        self.moments = [[[torch.zeros_like(c), torch.zeros_like(c)] for c in t] for t in cores]

    @torch.no_grad()
    def step(self, grads: list[list[Tensor]], touched: list[list[Tensor]]) -> None:
        """One step on the summed gradients, applied to touched slices only."""
        self.step_number += 1
        for table, table_cores in enumerate(self.cores):
            for k, core in enumerate(table_cores):
                mask = touched[table][k]
                m1, m2 = self.moments[table][k]
                core[mask] -= self.delta(core[mask], grads[table][k][mask], m1, m2, mask)

    def delta(self, w: Tensor, g: Tensor, m1: Tensor, m2: Tensor, mask: Tensor) -> Tensor:
        """What to subtract from the touched slices `w`; updates their moments."""
        rate, eps = self.settings["learning_rate"], self.settings["eps"]
        if self.optimizer is OptimType.EXACT_SGD:
            return rate * g
        if self.optimizer is OptimType.EXACT_ADAGRAD:
            m1[mask] += g.square()
            return rate * g / (m1[mask].sqrt() + eps)
        if self.optimizer is OptimType.EXACT_ROWWISE_ADAGRAD:
            m1[mask] += g.square().mean((1, 2, 3), keepdim=True)
            return rate * g / (m1[mask].sqrt() + eps)
        beta1, beta2 = self.settings["beta1"], self.settings["beta2"]
        m1[mask] = beta1 * m1[mask] + (1 - beta1) * g
        m2[mask] = beta2 * m2[mask] + (1 - beta2) * g.square()
        first = m1[mask] / (1 - beta1**self.step_number)
        second = m2[mask] / (1 - beta2**self.step_number)
        return rate * (first / (second.sqrt() + eps) + self.settings["weight_decay"] * w)


def make_tables(optimizer: OptimType, **kwargs: Any) -> TableBatchedFlowTTEmbeddingBags:
    """The three tables under `optimizer`, with entries of order one."""
    torch.manual_seed(0)
    return TableBatchedFlowTTEmbeddingBags(
        SPECS,
        feature_table_map=FEATURES,
        optimizer=optimizer,
        init_variances=[1.0] * len(SPECS),
        **kwargs,
    )


@pytest.mark.parametrize("optimizer", FUSED)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("precision", [torch.float32, torch.float64], ids=str)
def test_steps_match_the_float64_reference(
    optimizer: OptimType, weighted: bool, mean: bool, precision: torch.dtype
) -> None:
    settings = {"learning_rate": 0.05, "eps": 1e-3, "beta1": 0.8, "beta2": 0.95}
    settings["weight_decay"] = 0.02 if optimizer is OptimType.ADAM else 0.0
    tables = make_tables(
        optimizer,
        pooling_mode="mean" if mean else "sum",
        weights_precision=precision,
        **settings,
    )
    cores = [
        [core.detach().double().requires_grad_() for core in t] for t in tables.split_tt_cores()
    ]
    initial = copy.deepcopy(cores)
    reference = ReferenceOptimizer(optimizer, cores, **settings)
    ever_touched = [[torch.zeros(p, dtype=torch.bool) for p in spec.p_shapes] for spec in SPECS]
    tight = {"rtol": 1e-9, "atol": 1e-9}
    tolerance = tight if precision == torch.float64 else {"rtol": 2e-4, "atol": 2e-5}
    for step in range(5):
        batch = make_batch(step, weighted)
        if batch[2] is not None:
            batch[2].requires_grad_()
        output = tables(*batch)
        expected = reference_output(cores, batch, mean)
        torch.testing.assert_close(output.double(), expected, **tolerance)
        grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(step))
        output.backward(grad.to(output.dtype))
        if batch[2] is not None:
            weights_grad, batch[2].grad = batch[2].grad, None
        expected.backward(grad.double())
        if batch[2] is not None:
            # The derivative at the cores before the step.
            torch.testing.assert_close(weights_grad, batch[2].grad, rtol=2e-4, atol=1e-4)
        grads = []
        for table_cores in cores:
            grads.append([core.grad for core in table_cores])
            for core in table_cores:
                core.grad = None
        touched = touched_slices(batch)
        reference.step(grads, touched)  # type: ignore[arg-type]
        for table, masks in enumerate(touched):
            for k, mask in enumerate(masks):
                ever_touched[table][k] |= mask
        assert tables.iter.item() == step + 1
    states = tables.split_optimizer_states()
    for table, table_cores in enumerate(tables.split_tt_cores()):
        for k, core in enumerate(table_cores):
            assert core.grad is None
            torch.testing.assert_close(
                core.detach().double(), cores[table][k].detach(), **tolerance
            )
            mask = ever_touched[table][k]
            untouched = core.detach().double()[~mask]
            assert torch.equal(untouched, initial[table][k].detach()[~mask])
            for moment, (name, state) in enumerate(states[table][k].items(), 1):
                assert name == f"momentum{moment}"
                expected_state = reference.moments[table][k][moment - 1]
                if optimizer is OptimType.EXACT_ROWWISE_ADAGRAD:
                    expected_state = expected_state[:, 0, 0, 0]
                torch.testing.assert_close(state.double(), expected_state, **tolerance)
                assert state.abs().sum() > 0
                assert state[~mask].abs().sum() == 0
    assert any((~mask).any() for masks in ever_touched for mask in masks)


@pytest.mark.parametrize("optimizer", FUSED[:3])
def test_steps_are_those_of_fbgemm_on_slices(optimizer: OptimType) -> None:
    """FBGEMM's TBE trains a table whose rows are the slices of one core, on its gradients."""
    tbe = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    ops = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    configs = pytest.importorskip("fbgemm_gpu.split_embedding_configs")
    spec = TTSpec(64, 16, (4, 4, 4), (4, 1, 4), (4, 4))
    torch.manual_seed(0)
    tables = TableBatchedFlowTTEmbeddingBags(
        [spec], optimizer=optimizer, learning_rate=0.1, init_variances=[1.0]
    )
    dense = TableBatchedFlowTTEmbeddingBags([spec], optimizer="none")
    mirrors = []
    for core in tables.tt_cores:
        mirror = tbe.SplitTableBatchedEmbeddingBagsCodegen(
            [
                (
                    core.shape[0],
                    core[0].numel(),
                    ops.EmbeddingLocation.HOST,
                    ops.ComputeDevice.CPU,
                )
            ],
            optimizer=configs.EmbOptimType(optimizer.value),
            learning_rate=0.1,
        )
        mirror.split_embedding_weights()[0].copy_(core.detach().flatten(1))
        mirrors.append(mirror)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        indices = torch.randint(0, 40, (30,), generator=generator)
        offsets = torch.arange(0, 31, 3)
        grad = torch.randn(10, 16, generator=generator)
        dense.load_state_dict(tables.state_dict(), strict=False)
        dense.zero_grad()
        dense(indices, offsets).backward(grad)
        tables(indices, offsets).backward(grad)
        rest = indices
        for k in reversed(range(3)):
            mirror, core_grad = mirrors[k], dense.tt_cores[k].grad
            assert core_grad is not None
            slices = (rest % 4).unique()
            rest = rest // 4
            looked_up = mirror(slices, torch.arange(slices.numel() + 1))
            looked_up.backward(core_grad[slices].flatten(1))
    for core, mirror in zip(tables.tt_cores, mirrors, strict=True):
        torch.testing.assert_close(
            core.detach().flatten(1), mirror.split_embedding_weights()[0], rtol=1e-4, atol=1e-5
        )


def test_dense_gradients_with_torch_sgd_match_fused_sgd() -> None:
    fused = make_tables(OptimType.EXACT_SGD, learning_rate=0.1)
    dense = make_tables(OptimType.NONE)
    assert all(torch.equal(a, b) for a, b in zip(fused.tt_cores, dense.tt_cores, strict=True))
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
    for step in range(4):
        batch = make_batch(step, weighted=False)
        for model in (fused, dense):
            optimizer.zero_grad()
            model(*batch).square().sum().mul(0.01).backward()
        optimizer.step()
    for a, b in zip(fused.tt_cores, dense.tt_cores, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("optimizer", FUSED)
def test_half_precision_cores_step_in_float32(optimizer: OptimType, dtype: torch.dtype) -> None:
    wide = make_tables(optimizer, learning_rate=0.05)
    narrow = make_tables(optimizer, learning_rate=0.05, weights_precision=dtype)
    with torch.no_grad():
        for a, b in zip(wide.tt_cores, narrow.tt_cores, strict=True):
            a.copy_(b)
    batch = make_batch(0, weighted=False)
    for model in (wide, narrow):
        model(*batch).square().sum().mul(0.01).backward()
    for a, b in zip(wide.tt_cores, narrow.tt_cores, strict=True):
        assert b.dtype == dtype
        # Exactly one rounding to the cores' dtype, which may be stochastic: one unit each way.
        bound = torch.finfo(dtype).eps * a.detach().abs() + 1e-6
        assert ((a - b.float()).abs() <= bound).all()
    for states, wide_states in zip(
        narrow.split_optimizer_states(), wide.split_optimizer_states(), strict=True
    ):
        for state, wide_state in zip(states, wide_states, strict=True):
            for name, tensor in state.items():
                assert tensor.dtype == torch.float32
                torch.testing.assert_close(tensor, wide_state[name], rtol=1e-3, atol=1e-5)


def test_an_empty_batch_changes_no_core() -> None:
    for optimizer in FUSED:
        tables = make_tables(optimizer)
        before = copy.deepcopy(tables.tt_cores)
        empty = torch.zeros(0, dtype=torch.int64)
        tables(empty, torch.zeros(1, dtype=torch.int64)).sum().backward()  # B = 0
        tables(empty, torch.zeros(4 * 3 + 1, dtype=torch.int32)).sum().backward()  # no lookups
        assert all(torch.equal(a, b) for a, b in zip(tables.tt_cores, before, strict=True))


def test_learning_rate_changes_apply_to_the_next_step() -> None:
    tables = make_tables(OptimType.EXACT_SGD, learning_rate=0.1)
    indices, offsets = torch.tensor([3, 4, 5, 6]), torch.arange(5)
    before = copy.deepcopy(tables.tt_cores)
    tables.set_learning_rate(0.0)
    tables(indices, offsets).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(tables.tt_cores, before, strict=True))
    output = tables(indices, offsets)
    tables.set_learning_rate(0.5)
    assert tables.learning_rate == 0.5
    output.sum().backward()
    assert not torch.equal(tables.tt_cores[0], before[0])


@pytest.mark.parametrize("rate", [1e39, 3.4028235e38, 10**400, float("inf"), float("nan"), -1.0])
def test_learning_rates_that_are_refused_change_nothing(rate: float) -> None:
    tables = make_tables(OptimType.EXACT_ADAGRAD, learning_rate=0.1)
    with pytest.raises(ValueError, match="learning_rate must be finite .* fit float32"):
        tables.set_learning_rate(rate)
    assert tables.learning_rate == 0.1
    assert tables.learning_rate_tensor.item() == pytest.approx(0.1)
    for argument in ("learning_rate", "eps", "max_gradient"):
        with pytest.raises(ValueError, match=f"{argument} must be finite .* fit float32"):
            make_tables(OptimType.EXACT_ADAGRAD, **{argument: rate})
    tables.set_learning_rate(torch.finfo(torch.float32).max)


def test_every_backward_is_one_step_and_other_uses_of_stale_cores_are_refused() -> None:
    tables = make_tables(OptimType.EXACT_ADAGRAD)
    batch = make_batch(0, weighted=False)
    first, second = tables(*batch), tables(*make_batch(1, weighted=False))
    (first.sum() + second.sum()).backward()
    assert tables.iter.item() == 2
    penalty = tables.tt_cores[0].square().sum()
    tables(*batch).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


def test_nothing_steps_without_gradients() -> None:
    tables = make_tables(OptimType.EXACT_SGD)
    before = copy.deepcopy(tables.tt_cores)
    batch = make_batch(0, weighted=True)
    with torch.no_grad():
        assert not tables(*batch).requires_grad
    tables.requires_grad_(False)
    assert batch[2] is not None
    batch[2].requires_grad_()
    tables(*batch).sum().backward()
    assert batch[2].grad is not None
    assert all(torch.equal(a, b) for a, b in zip(tables.tt_cores, before, strict=True))
    tables.tt_cores[0].requires_grad_()
    with pytest.raises(ValueError, match="all require a gradient, or none .* got 1 of 9"):
        tables(*batch)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_double_backward_is_refused_before_the_step() -> None:
    tables = make_tables(OptimType.EXACT_SGD)
    before = copy.deepcopy(tables.tt_cores)
    with pytest.raises(RuntimeError, match="create_graph=True.*fused optimizer"):
        tables(*make_batch(0, weighted=False)).sum().backward(create_graph=True)
    assert tables.iter.item() == 0
    assert all(torch.equal(a, b) for a, b in zip(tables.tt_cores, before, strict=True))


def test_upstream_layers_train_along_and_a_torch_optimizer_may_hold_the_cores() -> None:
    tables = make_tables(OptimType.EXACT_ADAGRAD)
    linear = nn.Linear(40, 1)
    optimizer = torch.optim.SGD([*tables.parameters(), *linear.parameters()], lr=0.1)
    before = copy.deepcopy(linear.weight)
    linear(tables(*make_batch(0, weighted=False))).sum().backward()
    after_backward = copy.deepcopy(tables.tt_cores)
    optimizer.step()
    assert not torch.equal(linear.weight, before)
    assert all(torch.equal(a, b) for a, b in zip(tables.tt_cores, after_backward, strict=True))
