"""The console script ``flowtt`` and its commands."""

from __future__ import annotations

import click

from torchrec_flowtt.train.command import exit_with, train
from torchrec_flowtt.train.demo import demo
from torchrec_flowtt.version import __version__


@click.group()
@click.version_option(__version__, prog_name="flowtt")
def flowtt() -> None:
    """Tensor-Train compressed embedding tables for TorchRec."""


flowtt.add_command(train)
flowtt.add_command(demo)


def main() -> None:
    """Entry point of the console script."""
    exit_with(lambda: flowtt.main(prog_name="flowtt", standalone_mode=False))


if __name__ == "__main__":
    main()
