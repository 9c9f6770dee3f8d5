"""The training loop: epochs of pipelined steps, scores after each, checkpoints on the way."""

from __future__ import annotations

import math
import time
from typing import NoReturn

import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from torchrec_flowtt.config import DivergedError, Interrupted
from torchrec_flowtt.data.batches import (
    EvaluationBatches,
    ExampleStore,
    RankShare,
    TrainingBatches,
)
from torchrec_flowtt.train.checkpoint import CheckpointStore
from torchrec_flowtt.train.checkpoint_files import JobRecord
from torchrec_flowtt.train.evaluation import Scores, evaluate
from torchrec_flowtt.train.interruption import StopRequest
from torchrec_flowtt.train.model import ShardedModel, table_sharding
from torchrec_flowtt.train.preflight import Prepared
from torchrec_flowtt.train.processes import Processes
from torchrec_flowtt.train.reports import ProgressDisplay


class Trainer:
    """Trains a sharded model to the end of its configuration, or until it is asked to stop."""

    def __init__(
        self,
        prepared: Prepared,
        sharded: ShardedModel,
        processes: Processes,
        store: ExampleStore,
        checkpoints: CheckpointStore,
        display: ProgressDisplay,
        stop: StopRequest,
    ) -> None:
        """Takes up the run where ``prepared.progress`` says; the model holds that state."""
        self._config = prepared.config
        self._settings = prepared.settings
        self._tables = {table.name: table.shape() for table in prepared.tables}
        self._sharding = table_sharding(sharded.plan)
        self.progress = prepared.progress
        self._sharded = sharded
        self._processes = processes
        self._store = store
        self._checkpoints = checkpoints
        self._display = display
        self._stop = stop
        self._share = RankShare(self._config.train.batch_size, processes.rank, processes.world_size)
        self._batches = TrainingBatches(store, self._share, self._config.seed)
        self._pipeline = TrainPipelineSparseDist(sharded.model, sharded.optimizer, processes.device)
        # This rank's part of [window_loss, epoch_loss], on the device so that no step waits for it.
        self._loss_sums = torch.zeros(2, dtype=torch.float64, device=processes.device)
        self._saved_step = self.progress.global_step if self.progress.global_step else -1
        if processes.is_first:
            self._loss_sums[0] = self.progress.window_loss
            self._loss_sums[1] = self.progress.epoch_loss

    def run(self) -> Scores:
        """Trains the epochs that are left and returns the test scores.

        Raises:
            Interrupted: SIGINT or SIGTERM came; the checkpoint is written.
            RunFolderError: a checkpoint cannot be written.
            DivergedError: the loss is not finite, on every rank; nothing is saved of that state.
        """
        every = self._config.checkpoint.every_epochs
        while self.progress.epoch < self._config.train.epochs:
            self._train_epoch()
            if every and self.progress.epoch % every == 0:
                self._save()
            self._stop_if_asked(self._stop.vote())
        self._save()
        scores = self.evaluate("test")
        self._display.scores("test", scores, self.progress.global_step)
        return scores

    def evaluate(self, split: str) -> Scores:
        """The scores of a split.

        Raises:
            DivergedError: the model's predictions are not finite.
        """
        batches = EvaluationBatches(self._store, self._share, split)
        scores = evaluate(self._sharded.model, self._pipeline, batches, self._processes.device)
        if not math.isfinite(scores.log_loss):
            self._diverged(f"the {split} loss")
        return scores

    def _train_epoch(self) -> None:
        progress, train = self.progress, self._config.train
        self._display.epoch(progress.epoch + 1, train.epochs)
        self._sharded.model.train()
        # The pipeline reads ahead, but only whole steps are counted, so a resumed run rebuilds
        # exactly the batches that were read and not yet trained on.
        batches = self._batches.epoch(progress.epoch, progress.step)
        started = time.perf_counter()
        while progress.step < self._batches.steps_per_epoch:
            self._stop.start_vote()
            loss, _, _ = self._pipeline.progress(batches)
            # Each rank's share of the mean over all ranks: a resumed run may have other ranks.
            self._loss_sums += loss.double() / self._processes.world_size
            progress.step += 1
            progress.global_step += 1
            progress.window_steps += 1
            progress.examples += train.batch_size
            self._display.advance(train.batch_size)
            asked = self._stop.wait_vote()
            if progress.global_step % train.log_every == 0:
                self._log_loss()
            save = self._config.checkpoint.every_steps
            due = bool(save) and progress.global_step % save == 0
            last = progress.step == self._batches.steps_per_epoch
            if (asked or due) and not last:
                progress.seconds += time.perf_counter() - started
                if due:
                    self._save()
                self._stop_if_asked(asked)
                started = time.perf_counter()
        self._wait_for_device()
        progress.seconds += time.perf_counter() - started
        self._finish_epoch()

    def _finish_epoch(self) -> None:
        progress = self.progress
        self._gather_losses()
        steps = self._batches.steps_per_epoch
        train_loss = progress.epoch_loss / steps
        scores = self.evaluate("validation")
        progress.epoch += 1
        progress.step = 0
        progress.epoch_loss = 0.0
        self._loss_sums[1] = 0.0
        progress.epochs.append(
            {
                "epoch": progress.epoch,
                "train_loss": train_loss,
                "validation_auc": scores.auc,
                "validation_log_loss": scores.log_loss,
            }
        )
        self._display.scores("validation", scores, progress.global_step)
        self._display.say(
            f"epoch {progress.epoch}/{self._config.train.epochs}: train loss {train_loss:.4f},"
            f" validation AUC {scores.auc:.4f}, log-loss {scores.log_loss:.4f},"
            f" {progress.examples_per_second:,.0f} examples/s"
        )

    def _gather_losses(self) -> None:
        """Moves the sums of all ranks into ``progress``; rank 0 goes on with them, others from 0.

        A checkpoint calls it out of turn, which can change the last bit of a float64 sum that is
        only reported; the model never sees it.
        """
        dist.all_reduce(self._loss_sums, group=self._processes.group)
        self.progress.window_loss, self.progress.epoch_loss = self._loss_sums.tolist()
        if not math.isfinite(self.progress.epoch_loss):
            self._diverged("the training loss")
        if not self._processes.is_first:
            self._loss_sums.zero_()

    def _log_loss(self) -> None:
        progress = self.progress
        self._gather_losses()
        loss = progress.window_loss / progress.window_steps
        progress.losses.append([progress.global_step, loss])
        progress.window_loss = 0.0
        progress.window_steps = 0
        self._loss_sums[0] = 0.0
        self._display.loss(progress, loss)

    def _diverged(self, what: str) -> NoReturn:
        again = "start again"
        if self._saved_step >= 0:
            again = f"start another run_folder; the last checkpoint is step {self._saved_step}"
        raise DivergedError(
            f"{what} is not a finite number any more at step {self.progress.global_step}: the run"
            " diverged; lower optimizer.sparse.learning_rate and optimizer.dense.learning_rate and"
            f" {again}"
        )

    def _wait_for_device(self) -> None:
        if self._processes.device.type == "cuda":
            torch.cuda.synchronize(self._processes.device)

    def _stop_if_asked(self, asked: bool) -> None:
        if asked:
            self._stop.answered()
            self._save()
            raise Interrupted(
                f"stopped after step {self.progress.global_step}; its checkpoint is in"
                f" {self._config.checkpoint_folder}, --resume continues from there"
            )

    def _save(self) -> None:
        if self._saved_step == self.progress.global_step:
            return
        self._gather_losses()
        record = JobRecord(self._settings, self._tables, self.progress, self._sharding)
        self._checkpoints.save(self._sharded, record)
        self._saved_step = self.progress.global_step
