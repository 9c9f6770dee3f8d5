"""The errors a user of the training job can cause, each with its exit code.

Every message is one line that says what is wrong, where, and what to do about it. The command
line prints that line alone; what is not a :class:`JobError` is a defect and keeps its traceback.
"""

from __future__ import annotations


class JobError(Exception):
    """A mistake in what the user gave the job: its message is one line, its exit code not 0."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        """Joins the lines of ``message``, which may quote a longer one."""
        super().__init__(" ".join(message.split()))


class ConfigError(JobError):
    """A configuration that cannot work: unknown key or table, wrong type, impossible shape."""

    exit_code = 2


class DataError(JobError):
    """A data file that is missing, corrupt or inconsistent with the others."""

    exit_code = 3


class RunFolderError(JobError):
    """A run folder that cannot be written, is in use, or belongs to another run."""

    exit_code = 4


class CheckpointError(JobError):
    """A checkpoint that is missing, incomplete or of another model."""

    exit_code = 5


class DivergedError(JobError):
    """The loss is no longer a finite number."""

    exit_code = 6


class Interrupted(JobError):
    """The run was stopped by SIGINT or SIGTERM, after its checkpoint was written."""

    exit_code = 130
