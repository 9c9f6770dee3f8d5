"""Ctrl-C and SIGTERM as a request that the training loop answers between two steps."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

import torch
import torch.distributed as dist

GRACE_SECONDS = 25.0


class StopRequest:
    """Catches SIGINT and SIGTERM, and lets all ranks agree after which step to stop.

    torchrun passes a Ctrl-C on to processes that the terminal has already told, so a signal that
    comes twice means no more than one that comes once.

    A rank that sits in a collective whose peer has died cannot answer. It is therefore ended
    ``GRACE_SECONDS`` after the signal if by then :meth:`answered` was not called (torchrun itself
    kills after 30 seconds).
    """

    def __init__(self, control: dist.ProcessGroup) -> None:
        """Installs the handlers; ``control`` is a gloo group."""
        self._control = control
        self._flag = torch.zeros(1, dtype=torch.int64)
        self._work: dist.Work | None = None
        self._requested = False
        self._answered = threading.Event()
        # The C-level handler writes to this pipe even while the main thread is stuck in C.
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._previous_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._previous = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
        }
        threading.Thread(target=self._watch, daemon=True, name="flowtt-stop").start()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._requested = True

    def _watch(self) -> None:
        while True:
            numbers = os.read(self._reader, 64)
            if not numbers:
                return
            if any(number in (signal.SIGINT, signal.SIGTERM) for number in numbers):
                break
        if not self._answered.wait(GRACE_SECONDS):
            os._exit(130)

    def start_vote(self) -> None:
        """Begins the all-reduce of every rank's flag; it runs beside the training step."""
        self._flag.fill_(int(self._requested))
        self._work = dist.all_reduce(
            self._flag, op=dist.ReduceOp.MAX, group=self._control, async_op=True
        )

    def wait_vote(self) -> bool:
        """Whether any rank had been asked to stop when the vote began; the same on all ranks."""
        assert self._work is not None
        self._work.wait()
        return bool(self._flag.item())

    def vote(self) -> bool:
        """A vote that waits at once."""
        self.start_vote()
        return self.wait_vote()

    def answered(self) -> None:
        """The request is being served: the process is no longer ended from outside the loop."""
        self._answered.set()

    def close(self) -> None:
        """Puts the previous handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        self._answered.set()
        os.close(self._writer)
