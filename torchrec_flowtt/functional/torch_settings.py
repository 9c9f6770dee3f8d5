"""PyTorch's own settings that lookups follow."""

from __future__ import annotations

import torch


# A constant of the graph under torch.compile, as for torch's own products.
@torch.compiler.assume_constant_result
def tf32_allowed() -> bool:
    """Whether PyTorch allows TF32 in products of fp32 matrices on CUDA; not by default.

    True after ``torch.backends.cuda.matmul.fp32_precision = "tf32"``, and after the older
    ``torch.backends.cuda.matmul.allow_tf32 = True`` and
    ``torch.set_float32_matmul_precision("high")``.
    """
    precision: str = torch.backends.cuda.matmul.fp32_precision
    return precision == "tf32"


@torch.compiler.assume_constant_result
def determinism_required() -> bool:
    """Whether results have to be equal, bit by bit, from run to run; not by default.

    True after ``torch.use_deterministic_algorithms(True)``. As by torch's own operators it is read
    by every forward and every backward pass.
    """
    return torch.are_deterministic_algorithms_enabled()
