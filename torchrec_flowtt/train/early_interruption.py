"""Ctrl-C while the program is still loading. Imports next to nothing, so that it can come first."""

from __future__ import annotations

import os
import signal
from types import FrameType


def leave_quietly_on_ctrl_c() -> None:
    """Makes SIGINT end this process at once with exit code 130, until something else is installed.

    Loading torch takes seconds, and a KeyboardInterrupt in the middle of it comes out as whatever
    the library under way makes of it.
    """
    signal.signal(signal.SIGINT, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(130)
