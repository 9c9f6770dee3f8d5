"""Is a contender right? Checked against float64 before anything of it is timed."""

from __future__ import annotations

import math

import torch
from device_timing import capture
from lookup_contenders import Contender
from lookup_optimizers import EPS, LEARNING_RATE, first_direction, first_states, state_sizes
from lookup_workloads import Batch, Workload
from torch import Tensor

_OUTPUT_ROUNDING = {"float32": 0.0, "float16": 1e-3, "bfloat16": 8e-3}


def output_limit(workload: Workload, forward_limit: float) -> float:
    """Largest relative error of an output, its rounding to the output dtype included."""
    return max(forward_limit, _OUTPUT_ROUNDING[workload.output_dtype])


def relative_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Frobenius norm of the difference over that of the expectation, of all pairs together."""
    pairs = list(zip(actual, expected, strict=True))
    difference = sum((a.double() - e).square().sum().item() for a, e in pairs)
    return math.sqrt(difference / sum(e.square().sum().item() for _, e in pairs))


def forward_error(
    contender: Contender, workload: Workload, batches: list[Batch], sampled_lookups: int
) -> float:
    """Largest relative Frobenius error of the batches' outputs, in a sample of the bags of each.

    The sample has about `sampled_lookups` lookups of each table.

    The memory that an output will most likely get is filled with NaN before, so that an element
    that is not written shows; infinity if any element is not finite.
    """
    errors = []
    for seed, batch in enumerate(batches):
        shape, dtype = workload.output_shape, workload.output_torch_dtype
        poison = torch.full(shape, torch.nan, dtype=dtype, device=batch.indices.device)
        del poison
        with torch.no_grad():
            output = contender(batch)
        errors.append(_output_error(contender, workload, batch, output, seed, sampled_lookups))
    return max(errors)


def replay_error(
    contender: Contender, workload: Workload, batches: list[Batch], sampled_lookups: int
) -> float:
    """As :func:`forward_error`, of one CUDA graph that is replayed with the indices of each batch.

    Here the output is filled with NaN for certain. It also shows a kernel that relies on what the
    call before left behind.

    Raises:
        RuntimeError: the lookup cannot be captured.
    """
    first = batches[0]
    weights = first.per_sample_weights
    static = Batch(
        first.indices.clone(), first.offsets.clone(), None if weights is None else weights.clone()
    )
    outputs: list[Tensor] = []

    def call() -> None:
        with torch.no_grad():
            outputs.append(contender(static))

    (graph,) = capture([[call]])
    output = outputs[-1]
    errors = []
    for seed, batch in enumerate(batches):
        static.indices.copy_(batch.indices)
        if static.per_sample_weights is not None:
            static.per_sample_weights.copy_(batch.per_sample_weights)
        output.fill_(torch.nan)
        graph.replay()
        errors.append(_output_error(contender, workload, batch, output, seed, sampled_lookups))
    return max(errors)


def repeats_exactly(contender: Contender, batches: list[Batch]) -> bool:
    """Whether outputs of the same batch are the same bit for bit."""
    with torch.no_grad():
        return all(torch.equal(contender(batch), contender(batch)) for batch in batches)


def _output_error(
    contender: Contender,
    workload: Workload,
    batch: Batch,
    output: Tensor,
    seed: int,
    sampled_lookups: int,
) -> float:
    shape, dtype = workload.output_shape, workload.output_torch_dtype
    if output.shape != shape or output.dtype != dtype or not output.isfinite().all():
        return math.inf
    output = output.view(workload.batch_size, workload.tables, workload.embedding_dim)
    bags = max(1, min(workload.batch_size, sampled_lookups // workload.pooling_factor))
    generator = torch.Generator().manual_seed(seed)
    sample = torch.randperm(workload.batch_size, generator=generator)[:bags].to(output.device)
    indices, weights = batch.of_tables(workload)
    actual, expected = [], []
    for table in range(workload.tables):
        rows = contender.rows(table, indices[table, sample].flatten())
        rows = rows.view(bags, workload.pooling_factor, workload.embedding_dim)
        if weights is not None:
            rows = rows * weights[table, sample].double().unsqueeze(2)
        expected.append(rows.mean(1) if workload.pooling == "mean" else rows.sum(1))
        actual.append(output[sample, table])
    return relative_error(actual, expected)


def step_error(contender: Contender, batch: Batch, grad: Tensor, optimizer: str) -> float:
    """Takes the first optimizer step; its relative Frobenius error.

    It is the largest of the parameter tensors' steps and of the states that the step leaves (the
    squares in them by their roots), so it shows a step that is left out or done twice as well as a
    wrong one. The contender must not have taken a step before.

    The step of this check is made as large as the parameters themselves, so that rounding the new
    parameters does not hide it. Its eps is as large as the gradients: next to a small one, the
    first step of Adagrad and Adam is the sign of the gradient, which says nothing about its size
    and is wrong by all of the step where the gradient is about zero. With a large one, the step is
    about as wrong as the gradient. The learning rate and eps of the measurements are set
    afterwards.
    """
    gradients = contender.gradients(batch, grad)
    before = contender.parameters(batch)
    check_eps = max(_size(gradient) for gradient in gradients)
    directions = [first_direction(optimizer, gradient, check_eps) for gradient in gradients]
    pairs = list(zip(before, directions, strict=True))
    check_rate = max((value.norm() / direction.norm()).item() for value, direction in pairs)
    contender.set_step(check_rate, check_eps)
    contender(batch).backward(grad)
    contender.set_step(LEARNING_RATE, EPS)
    steps = [old - new for old, new in zip(before, contender.parameters(batch), strict=True)]
    # The rate is kept in float32.
    rate = torch.tensor(check_rate, dtype=torch.float32).item()
    found = list(zip(steps, [direction * rate for direction in directions], strict=True))
    for gradient, states in zip(gradients, contender.states(batch), strict=True):
        actual, expected = (
            state_sizes(optimizer, moments)
            for moments in (states, first_states(optimizer, gradient))
        )
        found += zip(actual, expected, strict=True)
    errors = [relative_error([actual], [expected]) for actual, expected in found]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def _size(gradient: Tensor) -> float:
    """Root mean square of the elements that are not zero, as those not looked up are."""
    return (gradient.norm() / gradient.count_nonzero().sqrt()).item()
