"""AUC and log-loss of a split, over all its examples and all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC

from torchrec_flowtt.data.batches import EvaluationBatches


@dataclass(frozen=True)
class Scores:
    """The scores of a split.

    Attributes:
        auc: area under the ROC curve, exact (no bins).
        log_loss: mean binary cross entropy in nats.
        examples: how many examples they are of.
    """

    auc: float
    log_loss: float
    examples: int


def evaluate(
    model: torch.nn.Module, pipeline: Any, batches: EvaluationBatches, device: torch.device
) -> Scores:
    """Runs the model over a split without training it; the same result on every rank.

    Args:
        model: the sharded model, whose train/eval mode is restored afterwards.
        pipeline: the TrainPipelineSparseDist of the model, empty.
        batches: the split.
        device: where predictions are.
    """
    auroc = BinaryAUROC(thresholds=None).to(device)
    log_loss = MeanMetric().to(device)
    log_loss.set_dtype(torch.float64)
    was_training = model.training
    model.eval()
    iterator = iter(batches)
    with torch.no_grad():
        for step in range(batches.steps):
            _, logits, labels = pipeline.progress(iterator)
            valid = batches.valid(step)
            logits, labels = logits[:valid].double(), labels[:valid]
            if valid:
                auroc.update(torch.sigmoid(logits), labels.long())
                log_loss.update(
                    functional.binary_cross_entropy_with_logits(
                        logits, labels.double(), reduction="none"
                    )
                )
    model.train(was_training)
    # Both synchronise over the default process group here.
    return Scores(float(auroc.compute()), float(log_loss.compute()), len(batches))
