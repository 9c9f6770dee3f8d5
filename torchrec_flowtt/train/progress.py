"""Where a run is: what a checkpoint must hold besides tensors to go on as if nothing happened."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Progress:
    """The position and the history of a run.

    Attributes:
        epoch: epochs completed.
        step: steps completed of the epoch after those.
        global_step: steps completed in all.
        examples: examples trained on, over all ranks.
        seconds: time spent in training steps, without evaluation and checkpoints.
        epoch_loss: sum over the epoch's completed steps of the loss, averaged over ranks.
        window_loss, window_steps: the same since the last logged loss.
        losses: ``[global_step, loss]`` pairs as logged: means over ``train.log_every`` steps.
        epochs: one record of scores per completed epoch.
    """

    epoch: int = 0
    step: int = 0
    global_step: int = 0
    examples: int = 0
    seconds: float = 0.0
    epoch_loss: float = 0.0
    window_loss: float = 0.0
    window_steps: int = 0
    losses: list[list[float]] = field(default_factory=list)
    epochs: list[dict[str, float]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """All fields; JSON keeps floats exactly."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Progress:
        """The inverse of :meth:`to_json`."""
        return cls(**content)

    @property
    def examples_per_second(self) -> float:
        """Training throughput over all ranks, 0 before the first step."""
        return self.examples / self.seconds if self.seconds > 0.0 else 0.0
