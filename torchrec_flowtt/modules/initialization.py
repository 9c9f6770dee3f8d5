"""Random TT-cores whose reconstructed table has the variance asked for."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_flowtt.functional.cores import check_cores

__all__ = ["default_variance", "initialize_tt_cores_", "second_moment"]

# Elements of a core that are converted to float64 at a time.
_CHUNK_ELEMENTS = 1 << 20


def default_variance(num_embeddings: int) -> float:
    """Variance of TorchRec's default initialisation, uniform in ``+-1 / sqrt(N)``: ``1 / (3 N)``.

    >>> default_variance(100)
    0.0033333333333333335
    """
    return 1.0 / (3.0 * num_embeddings)


def second_moment(cores: Sequence[Tensor]) -> float:
    """Mean square of the entries of the whole table, ``p_1 .. p_d`` rows by D columns.

    The table is never formed. With ``S_0 = 1`` and, core after core, the r_k x r_k Gram matrix
    ``S_k = sum over i, j of G_k[i, :, j, :]^T @ S_(k-1) @ G_k[i, :, j, :]``, the sum of squares is
    ``S_d`` (the norm of a tensor train, Oseledets 2011, section 4.2). Each ``S_k`` is divided by
    ``p_k * q_k``, so it stays a mean; computed in float64.

    Args:
        cores: TT-cores ``[p_k, r_(k-1), q_k, r_k]``, any floating dtype.

    Returns:
        The mean square. Waits for the device.

    >>> second_moment([torch.full((2, 1, 3, 1), 2.0), torch.full((4, 1, 1, 1), 0.5)])
    1.0
    """
    check_cores(cores)
    gram = torch.ones(1, 1, dtype=torch.float64, device=cores[0].device)
    for core in cores:
        p, rank_in, q, rank_out = core.shape
        rows_per_chunk = max(1, _CHUNK_ELEMENTS // (rank_in * q * rank_out))
        total = gram.new_zeros(rank_out, rank_out)
        for chunk in core.detach().split(rows_per_chunk):
            slices = chunk.double().flatten(2)
            product = (gram @ slices).reshape(-1, rank_out)
            total += slices.reshape(-1, rank_out).t() @ product
        gram = total / (p * q)
    return float(gram.item())


@torch.no_grad()
def initialize_tt_cores_(
    cores: Sequence[Tensor], variance: float, generator: torch.Generator | None = None
) -> None:
    """Fills `cores` with Gaussian numbers so that the table they stand for has `variance`.

    Entries of a core are independent with mean zero, hence so is the table's mean; their standard
    deviations are such that the slices ``G_k[i]`` have the same mean square Frobenius norm in every
    core, whatever the ranks. Then all cores are scaled by one factor, which makes the mean square
    of the table's entries equal to `variance` up to the rounding of the cores' dtype (the
    expectation alone would leave a table of low rank far off, because its entries are products of
    few independent numbers).

    Args:
        cores: TT-cores ``[p_k, r_(k-1), q_k, r_k]``, written in place; on the meta device nothing
            happens.
        variance: mean square of the reconstructed entries, positive.
        generator: source of randomness, on the cores' device; default torch's.

    Raises:
        TypeError: the cores' dtypes do not fit, or `variance` is no real number.
        ValueError: the cores' shapes do not fit, `variance` is not positive and finite, or the
            cores' dtype cannot hold numbers of the size needed.

    >>> cores = [torch.empty(30, 1, 4, 8), torch.empty(40, 8, 4, 1)]
    >>> initialize_tt_cores_(cores, 0.25)
    >>> round(second_moment(cores), 5)
    0.25
    """
    check_cores(cores)
    given: object = variance
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        kind = type(given).__name__
        raise TypeError(f"variance must be a real number, got {given!r} ({kind})")
    if not 0.0 < variance < math.inf:
        raise ValueError(f"variance must be positive and finite, got {variance}")
    if cores[0].device.type == "meta":
        return
    # The table's variance is the product over the cores of deviation_k^2 * r_k. Slices of equal
    # squared norm n have deviation_k^2 = n / (r_(k-1) q_k r_k), hence n^d is the variance times
    # the product of all r_(k-1) q_k. Logarithms keep that product in range.
    log_norm = math.log(variance)
    for core in cores:
        log_norm += math.log(core.shape[1] * core.shape[2])
    log_norm /= len(cores)
    deviations = [math.exp(log_norm / 2) / math.sqrt(math.prod(core.shape[1:])) for core in cores]
    dtype = cores[0].dtype
    # Sampled at scale one in at least float32, and measured before the cores' dtype rounds them.
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    samples = [
        torch.randn(core.shape, generator=generator, dtype=wide, device=core.device)
        for core in cores
    ]
    for sample in samples:  # the norm itself, not only its expectation
        sample /= sample.square().mean().sqrt()
    log_moment = math.log(second_moment(samples))
    expected_log_moment = sum(math.log(core.shape[3]) for core in cores)
    correction = math.exp((expected_log_moment - log_moment) / (2 * len(cores)))
    limits = torch.finfo(dtype)
    for k, (core, sample, deviation) in enumerate(zip(cores, samples, deviations, strict=True)):
        scale = deviation * correction
        if not limits.smallest_normal < scale < limits.max / 16:
            raise ValueError(
                f"variance {variance} needs numbers of size {scale:.3g} in core {k} of shape "
                f"{tuple(core.shape)}, which {dtype} does not hold; use bfloat16 or float32 cores"
            )
        core.copy_(sample.mul_(scale))
