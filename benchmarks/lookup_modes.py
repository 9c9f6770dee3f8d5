"""The modes in which the lookup benchmarks run TT tables and FBGEMM's tables."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from lookup_optimizers import CONTENDER_SUFFIXES

PHASES = ("forward", "training")
DISABLE_VARIABLE = "FLOWTT_CUDA_DISABLE"
MECHANISMS = ("fusion", "grouping", "folding", "sharing", "stealing", "checkpoints")


@dataclasses.dataclass(frozen=True)
class Mode:
    """One way to run a contender.

    Attributes:
        contender: its name in the results.
        precision: of the arithmetic, as in the results.
        weights_dtype: of the cores or the table.
        forward_limit: largest relative error of an output.
        step_limit: largest relative error of an optimizer step, and of the gradient as its state
            has it; it includes rounding the new parameters to their dtype.
        settings: switches torch and the operators to this mode.
        phases: in which it differs from other modes.
        repeats_exactly: results are the same bit for bit from run to run.
        keeps_packed_cores: of a TT module, between lookups.
        optimizer: of the training, as the modules take it.
    """

    contender: str
    precision: str
    weights_dtype: torch.dtype
    forward_limit: float
    step_limit: float
    settings: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    phases: tuple[str, ...] = PHASES
    repeats_exactly: bool = False
    keeps_packed_cores: bool = False
    optimizer: str = "exact_sgd"

    @property
    def key(self) -> str:
        """How the command line names it."""
        return f"{self.contender}/{self.precision}"

    @property
    def is_tensor_train(self) -> bool:
        """Whether the tables are compressed."""
        return self.contender.startswith("flowtt")


@contextlib.contextmanager
def matmul_tf32(allowed: bool) -> Iterator[None]:
    """PyTorch's own switch, which the operators follow."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@contextlib.contextmanager
def environment(variable: str, value: str) -> Iterator[None]:
    """Sets a variable that the operators read at every call."""
    before = os.environ.get(variable)
    os.environ[variable] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Results that are the same bit for bit from run to run, in fp32."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with matmul_tf32(False):
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def disabled_mechanisms(mechanisms: Sequence[str]) -> AbstractContextManager[None]:
    """Switches mechanisms of the CUDA forward off."""
    return environment(DISABLE_VARIABLE, ",".join(mechanisms))


def with_optimizer(mode: Mode, optimizer: str) -> Mode:
    """The mode with another optimizer than SGD, which a forward has nothing to do with."""
    return dataclasses.replace(
        mode,
        contender=mode.contender + CONTENDER_SUFFIXES[optimizer],
        phases=("training",),
        optimizer=optimizer,
    )


# A new mode of the operators is one more line here.
_FP32 = Mode("flowtt", "fp32", torch.float32, 2e-6, 1e-5, lambda: matmul_tf32(False))
_TF32 = Mode("flowtt", "tf32", torch.float32, 1e-3, 2e-3, lambda: matmul_tf32(True))
FLOWTT_MODES = (
    _FP32,
    _TF32,
    # Cores of 16 bits, and like PyTorch's products of such operands no more accurate than they are.
    Mode("flowtt", "fp16", torch.float16, 1e-3, 1e-2, lambda: matmul_tf32(True)),
    Mode("flowtt", "bf16", torch.bfloat16, 1e-2, 5e-2, lambda: matmul_tf32(True)),
    Mode(
        "flowtt_deterministic",
        "fp32",
        torch.float32,
        2e-6,
        3e-5,
        deterministic,
        repeats_exactly=True,
    ),
    *(
        # Training changes the cores in every step, and packs as without.
        dataclasses.replace(
            mode, contender="flowtt_packed", phases=("forward",), keeps_packed_cores=True
        )
        for mode in (_FP32, _TF32)
    ),
)
FBGEMM_MODES = tuple(
    Mode(contender, precision, dtype, 1e-6, step_limit)
    for precision, dtype, step_limit in (
        ("fp32", torch.float32, 3e-5),
        ("fp16", torch.float16, 1e-2),
        ("bf16", torch.bfloat16, 5e-2),
    )
    for contender in ("fbgemm", "fbgemm_no_check")
)
OPTIMIZER_MODES = tuple(
    with_optimizer(mode, optimizer)
    for optimizer in CONTENDER_SUFFIXES
    for mode in (_FP32, _TF32, FBGEMM_MODES[0])
    if optimizer != mode.optimizer
)
MODES = {mode.key: mode for mode in (*FLOWTT_MODES, *FBGEMM_MODES, *OPTIMIZER_MODES)}
DEFAULT_MODES = (
    "flowtt/fp32",
    "flowtt/tf32",
    "flowtt/bf16",
    "flowtt_deterministic/fp32",
    "flowtt_packed/fp32",
    "flowtt_packed/tf32",
    "flowtt_adagrad/tf32",
    "flowtt_row_wise_adagrad/tf32",
    "flowtt_adam/tf32",
    "fbgemm/fp32",
    "fbgemm_no_check/fp32",
    "fbgemm/fp16",
    "fbgemm_adagrad/fp32",
    "fbgemm_row_wise_adagrad/fp32",
    "fbgemm_adam/fp32",
)


def select_modes(keys: Sequence[str]) -> list[Mode]:
    """Modes by ``contender/precision``, or by the contender alone: all its precisions.

    Raises:
        ValueError: there is no such mode.
    """
    found: list[Mode] = []
    for key in keys:
        matching = [mode for mode in MODES.values() if key in (mode.key, mode.contender)]
        if not matching:
            raise ValueError(f"no contender {key!r}; there are: {', '.join(MODES)}")
        found += [mode for mode in matching if mode not in found]
    return found
