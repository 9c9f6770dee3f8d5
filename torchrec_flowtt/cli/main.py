"""The console script ``flowtt`` and its commands."""

from __future__ import annotations

import importlib

import click

from torchrec_flowtt.train.early_interruption import leave_quietly_on_ctrl_c
from torchrec_flowtt.version import __version__

# Name to module; each has the command under its own name, and takes torch's time to load.
COMMANDS = {
    "calibrate": "torchrec_flowtt.planner.calibrate",
    "decompose": "torchrec_flowtt.cli.tables",
    "demo": "torchrec_flowtt.train.demo",
    "import-tt-rec": "torchrec_flowtt.cli.tables",
    "reconstruct": "torchrec_flowtt.cli.tables",
    "train": "torchrec_flowtt.train.command",
}


class LateGroup(click.Group):
    """A group that imports a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports a command; None if there is no such one."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name])
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command


@click.group(cls=LateGroup, invoke_without_command=True)
@click.version_option(__version__, prog_name="flowtt")
@click.pass_context
def flowtt(context: click.Context) -> None:
    """Tensor-Train compressed embedding tables for TorchRec."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main() -> None:
    """Entry point of the console script."""
    leave_quietly_on_ctrl_c()
    from torchrec_flowtt.train.command import exit_with

    exit_with(lambda: flowtt.main(prog_name="flowtt", standalone_mode=False))


if __name__ == "__main__":
    main()
