"""Many TT tables in one call, called as FBGEMM's `SplitTableBatchedEmbeddingBagsCodegen`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchrec_flowtt.functional import FusedUpdate, PoolingMode
from torchrec_flowtt.functional.cores import CORE_DTYPES, accumulation_dtype
from torchrec_flowtt.functional.embedding_bag import batched_lookup
from torchrec_flowtt.functional.lookup import BatchedLookup
from torchrec_flowtt.modules.initialization import default_variance, initialize_tt_cores_
from torchrec_flowtt.modules.lookup_errors import NAMED_ERRORS, named_in_batch
from torchrec_flowtt.modules.optimizers import OptimizerConfig, OptimType
from torchrec_flowtt.modules.packed_cores import KeepsPackedCores
from torchrec_flowtt.shapes import TTSpec

__all__ = ["TableBatchedFlowTTEmbeddingBags"]


class TableBatchedFlowTTEmbeddingBags(KeepsPackedCores):
    """T TT tables of any shapes, looked up by F features in one operator call.

    With a fused optimizer (any but ``NONE``) each backward is one optimizer step on the gradient
    summed over the batch and over all features of a table; the cores' ``grad`` stays None, a
    second derivative is refused, and gradient scaling or clipping outside does not reach the step.
    A step touches only the core slices that were looked up. With ``NONE`` the cores get dense
    gradients. Freeze a module with ``requires_grad_(False)`` or ``torch.no_grad()``;
    ``eval()`` alone does not stop the steps, as it does not stop gradients anywhere in torch. A
    table that is to be frozen while others train needs a module of its own.

    A fused step is of the gradient that its own process has. Replicas would part without an error,
    so do not wrap such a module in ``DistributedDataParallel``: use the optimizer ``"none"`` there,
    or the sharded collection. Load checkpoints between steps, not between a forward and its
    backward, whose step goes to the tensors that the forward had. The learning rate is an argument,
    not in the state dict.

    Args:
        embedding_specs: shape of each table.
        feature_table_map: table of each feature, ``[F]``; default one feature a table, in order.
        pooling_mode: sum, mean or none, for all features. Without pooling, as in FBGEMM, each
            lookup gets its own row of the result, and all tables must have one D.
        optimizer: an :class:`~torchrec_flowtt.modules.OptimType`, its value, or FBGEMM's member.
        learning_rate: step size; change it with :meth:`set_learning_rate`.
        eps: added to the denominator of Adagrad and Adam.
        beta1: decay of Adam's first moment.
        beta2: decay of Adam's second moment.
        weight_decay: decoupled weight decay, Adam only.
        stochastic_rounding: of the steps of float16 and bfloat16 cores on CUDA, as in FBGEMM.
        gradient_clipping: whether the gradient of the result is brought into
            ``[-max_gradient, max_gradient]``, element by element, before the step.
        max_gradient: see gradient_clipping.
        weights_precision: dtype of the cores: float32, float16, bfloat16 or float64.
        output_dtype: dtype of the result: float32, float16 or bfloat16. float64 cores always give
            float64. Not changed by autocast.
        device: device of cores and optimizer state. On ``"meta"`` nothing is allocated; use
            :meth:`to_empty` and :meth:`init_parameters` afterwards.
        init_variances: variance of the entries of each table at initialisation; default
            ``1 / (3 N)``, that of TorchRec's `EmbeddingBagConfig`.
        feature_names: name of each feature, for messages.

    Attributes:
        tt_cores: parameters, table after table; in the state dict ``tt_cores.0`` and on.
        iter: 0-dim int64 buffer, optimizer steps done.
        momentum1_0, momentum2_0, ..: optimizer state of each core, buffers; see
            :meth:`split_optimizer_states`. Always float32 (float64 for float64 cores).

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or lengths disagree.

    Example: two features share table 0, one reads table 1; B = 2.

    >>> ads = TTSpec.suggest(1000, 16, tt_ranks=8, name="ads")
    >>> users = TTSpec.suggest(500, 8, tt_ranks=4, name="users")
    >>> tables = TableBatchedFlowTTEmbeddingBags(
    ...     [ads, users], feature_table_map=[0, 0, 1], optimizer="exact_adagrad"
    ... )
    >>> indices = torch.tensor([3, 7, 999, 0, 0, 499, 2])
    >>> offsets = torch.tensor([0, 2, 3, 3, 4, 6, 7])  # bags of feature 0, then of 1, then of 2
    >>> output = tables(indices, offsets)
    >>> output.shape
    torch.Size([2, 40])
    >>> output.sum().backward()  # performs one Adagrad step
    >>> tables.iter.item(), tables.tt_cores[0].grad
    (1, None)
    """

    iter: Tensor
    learning_rate_tensor: Tensor

    def __init__(
        self,
        embedding_specs: Sequence[TTSpec],
        *,
        feature_table_map: Sequence[int] | None = None,
        pooling_mode: PoolingMode | int | str = PoolingMode.SUM,
        optimizer: OptimType | str = OptimType.EXACT_SGD,
        learning_rate: float = 0.01,
        eps: float = 1e-8,
        beta1: float = 0.9,
        beta2: float = 0.999,
        weight_decay: float = 0.0,
        stochastic_rounding: bool = True,
        gradient_clipping: bool = False,
        max_gradient: float = 1.0,
        weights_precision: torch.dtype = torch.float32,
        output_dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        init_variances: Sequence[float] | None = None,
        feature_names: Sequence[str] | None = None,
    ) -> None:
        """Builds cores and optimizer state; see the class for the arguments."""
        super().__init__()
        self.embedding_specs = tuple(embedding_specs)
        _check_specs(self.embedding_specs)
        tables = len(self.embedding_specs)
        self.feature_table_map = _checked_feature_table_map(feature_table_map, tables)
        if isinstance(feature_names, str):
            raise TypeError(
                "feature_names must have one string a feature, got a single string, "
                f"{feature_names!r}"
            )
        self.feature_names = tuple(feature_names or ())
        if feature_names is not None and len(feature_names) != len(self.feature_table_map):
            raise ValueError(
                "feature_names must have one entry a feature, "
                f"{len(self.feature_table_map)}, got {len(feature_names)}"
            )
        self.pooling_mode = PoolingMode.of(pooling_mode)
        if self.pooling_mode is PoolingMode.NONE:
            _check_equal_dims(self.embedding_specs)
        self.optimizer_config = OptimizerConfig(
            OptimType(optimizer),
            learning_rate,
            eps,
            beta1,
            beta2,
            weight_decay,
            stochastic_rounding,
            gradient_clipping,
            max_gradient,
        )
        if weights_precision not in CORE_DTYPES:
            names = ", ".join(str(dtype) for dtype in CORE_DTYPES)
            raise TypeError(f"weights_precision must be one of {names}, got {weights_precision}")
        _check_output_dtype(output_dtype, weights_precision)
        self.output_dtype = output_dtype
        if init_variances is None:
            init_variances = [
                default_variance(spec.num_embeddings) for spec in self.embedding_specs
            ]
        if len(init_variances) != tables:
            raise ValueError(
                f"init_variances must have one entry a table, {tables}, got {len(init_variances)}"
            )
        self.init_variances = tuple(init_variances)
        self._cores_per_table = [spec.num_cores for spec in self.embedding_specs]
        self._num_embeddings = [spec.num_embeddings for spec in self.embedding_specs]

        self.tt_cores = nn.ParameterList(
            nn.Parameter(torch.empty(shape, dtype=weights_precision, device=device))
            for spec in self.embedding_specs
            for shape in spec.core_shapes
        )
        self._core_names = [str(core) for core in range(len(self.tt_cores))]
        self._learning_rate = self.optimizer_config.learning_rate
        self._register_optimizer_state()
        self.init_parameters()

    def _register_optimizer_state(self) -> None:
        optimizer = self.optimizer
        if optimizer is OptimType.NONE:
            return
        device = self.tt_cores[0].device
        dtype = accumulation_dtype(self.tt_cores[0].dtype)
        rate = torch.full((), self._learning_rate, dtype=torch.float32, device=device)
        # A hyper-parameter: whoever resumes a run sets it anew, so it is not saved.
        self.register_buffer("learning_rate_tensor", rate, persistent=False)
        self.register_buffer("iter", torch.zeros((), dtype=torch.int64, device=device))
        for moment in range(1, optimizer.num_moments + 1):
            for k, core in enumerate(self.tt_cores):
                by_slice = optimizer is OptimType.EXACT_ROWWISE_ADAGRAD
                shape = core.shape[:1] if by_slice else core.shape
                state = torch.zeros(shape, dtype=dtype, device=device)
                self.register_buffer(f"momentum{moment}_{k}", state)

    @property
    def optimizer(self) -> OptimType:
        """The optimizer."""
        return self.optimizer_config.optimizer

    @property
    def learning_rate(self) -> float:
        """The current step size."""
        return self._learning_rate

    @property
    def weights_precision(self) -> torch.dtype:
        """Type of the cores' elements."""
        dtype: torch.dtype = self.tt_cores[0].dtype
        return dtype

    @torch.no_grad()
    def init_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws new cores of the variances asked for and clears the optimizer state.

        Args:
            generator: source of randomness on the cores' device; default torch's.
        """
        for cores, variance in zip(self.split_tt_cores(), self.init_variances, strict=True):
            initialize_tt_cores_(cores, variance, generator)
        self._reset_buffers()

    def _reset_buffers(self) -> None:
        for name, buffer in self.named_buffers(recurse=False):
            if name == "learning_rate_tensor":
                buffer.fill_(self._learning_rate)
            else:
                buffer.zero_()

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets the step size of the fused optimizer, also for a captured CUDA graph.

        Raises:
            TypeError: `learning_rate` is no real number.
            ValueError: it is negative, not finite or too large for float32, or the module has no
                fused optimizer. The step size is then as before.
        """
        if self.optimizer is OptimType.NONE:
            raise ValueError(
                "set_learning_rate needs a fused optimizer, but this module has 'none': set the "
                "rate of the torch optimizer that updates its cores"
            )
        # Validates; the optimizer's other settings play no part in that.
        rate = OptimizerConfig(learning_rate=learning_rate).learning_rate
        self.learning_rate_tensor.fill_(rate)
        self._learning_rate = rate

    def split_tt_cores(self) -> list[list[nn.Parameter]]:
        """The cores of each table."""
        cores = iter(self.tt_cores)
        return [[next(cores) for _ in range(count)] for count in self._cores_per_table]

    def split_optimizer_states(self) -> list[list[dict[str, Tensor]]]:
        """For each table and core the optimizer's state tensors, themselves and not copies.

        Keys are ``"momentum1"`` (Adagrad: sums of squares shaped as the core; row-wise Adagrad:
        ``[p_k]``; Adam: first moment) and ``"momentum2"`` (Adam: second moment). SGD and ``NONE``
        have none.
        """
        moments = range(1, self.optimizer.num_moments + 1)
        states = iter(
            {f"momentum{moment}": self._moment(moment, k) for moment in moments}
            for k in range(len(self.tt_cores))
        )
        return [[next(states) for _ in range(count)] for count in self._cores_per_table]

    def forward(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Looks up and pools a batch of B bags for each of the F features.

        Args:
            indices: row indices, feature after feature, int32 or int64, ``[nnz]``.
            offsets: bag (f, b) is ``indices[offsets[f * B + b] : offsets[f * B + b + 1]]``; int32
                or int64, ``[F * B + 1]``.
            per_sample_weights: a factor for each row, ``[nnz]``, floating. Differentiable. Must be
                None without pooling.

        Returns:
            ``[B, sum over features of D]`` of `output_dtype`; without pooling ``[nnz, D]``, one row
            an index.

        Raises:
            TypeError, ValueError, IndexError: see
                :func:`~torchrec_flowtt.functional.table_batched_tt_embedding_bag`.
        """
        cores = self._all_cores()
        lookup = BatchedLookup(
            cores_per_table=self._cores_per_table,
            num_embeddings=self._num_embeddings,
            feature_table_map=self.feature_table_map,
            pooling_mode=int(self.pooling_mode),
            output_dtype=torch.float64 if cores[0].dtype == torch.float64 else self.output_dtype,
        )
        try:
            return batched_lookup(
                indices,
                offsets,
                per_sample_weights,
                cores,
                lookup,
                update=self._fused_update(),
                packed=self._packed_cores,
            )
        except NAMED_ERRORS as error:
            tables = [spec.name for spec in self.embedding_specs]
            raise named_in_batch(
                error, self.feature_names, tables, self.feature_table_map
            ) from None

    def _all_cores(self) -> list[Tensor]:
        # To iterate over a ParameterList takes 1 us a parameter. Pruning and parametrizations
        # rename those that they compute a core from.
        parameters = self.tt_cores._parameters
        if list(parameters) == self._core_names:
            return [core for core in parameters.values() if core is not None]
        return list(self.tt_cores)

    def _moment(self, moment: int, core: int) -> Tensor:
        state = self._buffers[f"momentum{moment}_{core}"]
        assert state is not None
        return state

    def _fused_update(self) -> FusedUpdate | None:
        config = self.optimizer_config
        if config.optimizer is OptimType.NONE or not torch.is_grad_enabled():
            return None
        momentum1, momentum2 = (
            [self._moment(moment, k) for k in range(len(self.tt_cores))]
            if moment <= config.optimizer.num_moments
            else []
            for moment in (1, 2)
        )
        return FusedUpdate(
            optimizer=config.optimizer.value,
            learning_rate=self.learning_rate_tensor,
            iter=self.iter,
            momentum1=momentum1,
            momentum2=momentum2,
            eps=config.eps,
            beta1=config.beta1,
            beta2=config.beta2,
            weight_decay=config.weight_decay,
            stochastic_rounding=config.stochastic_rounding,
            gradient_clipping=config.gradient_clipping,
            max_gradient=config.max_gradient,
        )

    def _apply(
        self, fn: Callable[..., Any], recurse: bool = True
    ) -> TableBatchedFlowTTEmbeddingBags:
        """Keeps the optimizer state in full precision when the cores change their dtype.

        It also gives the state its first values when `to_empty` brings it into being, so that
        loading a checkpoint afterwards leaves nothing undefined.
        """
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        state_dtype = accumulation_dtype(self.tt_cores[0].dtype)
        for name, old in before.items():
            if not old.is_floating_point():
                continue
            dtype = torch.float32 if name == "learning_rate_tensor" else state_dtype
            new = self.get_buffer(name)
            if new.dtype != dtype:
                # From the old buffer: the new one has lost precision.
                setattr(self, name, old.to(device=new.device, dtype=dtype))
        if any(old.is_meta for old in before.values()) and not self.iter.is_meta:
            self._reset_buffers()
        return self

    def extra_repr(self) -> str:
        """Tables, features, precision and optimizer, for ``repr``."""
        parameters = sum(spec.num_parameters for spec in self.embedding_specs)
        return (
            f"tables={len(self.embedding_specs)}, features={len(self.feature_table_map)}, "
            f"parameters={parameters}, pooling_mode={self.pooling_mode.name.lower()}, "
            f"weights_precision={self.weights_precision}, output_dtype={self.output_dtype}, "
            f"optimizer={self.optimizer.value}, learning_rate={self._learning_rate:g}"
        )


def _check_specs(specs: tuple[object, ...]) -> None:
    if not specs:
        raise ValueError("embedding_specs must hold at least one TTSpec, got none")
    for table, spec in enumerate(specs):
        if not isinstance(spec, TTSpec):
            raise TypeError(
                f"embedding_specs[{table}] must be a TTSpec, got {spec!r} ({type(spec).__name__})"
            )


def _check_output_dtype(output_dtype: object, weights_precision: torch.dtype) -> None:
    valid = [torch.float32, torch.float16, torch.bfloat16]
    if weights_precision == torch.float64:  # the others are for after a conversion of the module
        valid.append(torch.float64)
    if output_dtype not in valid:
        names = ", ".join(str(dtype) for dtype in valid)
        raise TypeError(
            f"output_dtype must be one of {names} for cores of {weights_precision}, "
            f"got {output_dtype}"
        )


def _check_equal_dims(specs: tuple[TTSpec, ...]) -> None:
    for table, spec in enumerate(specs):
        if spec.embedding_dim != specs[0].embedding_dim:
            raise ValueError(
                "embedding_specs must have one embedding_dim with pooling_mode 'none', as every "
                f"lookup is a row of the result, but table 0 has {specs[0].embedding_dim} and "
                f"table {table} has {spec.embedding_dim}"
            )


def _checked_feature_table_map(feature_table_map: Sequence[int] | None, tables: int) -> list[int]:
    if feature_table_map is None:
        return list(range(tables))
    if len(feature_table_map) == 0:
        raise ValueError("feature_table_map must name a table for at least one feature, got none")
    for feature, table in enumerate(feature_table_map):
        if not isinstance(table, int) or isinstance(table, bool):
            raise TypeError(
                f"feature_table_map[{feature}] must be an int, got {table!r} "
                f"({type(table).__name__})"
            )
        if not 0 <= table < tables:
            raise ValueError(
                f"feature_table_map[{feature}] must name a table, 0 to {tables - 1}, got {table}"
            )
    return list(feature_table_map)
