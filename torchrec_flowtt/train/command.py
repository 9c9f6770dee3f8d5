"""The ``train`` command, the same for ``python -m torchrec_flowtt.train`` and ``flowtt train``."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import click

from torchrec_flowtt.config import Interrupted, JobError, load_config
from torchrec_flowtt.train.processes import launched_world, lost_another_process, report_error

INTERNAL_ERROR = 70
DEFAULT_CONFIG = Path("configs/movielens.yaml")


@click.command("train")
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    default=DEFAULT_CONFIG,
    show_default=True,
    help="YAML file of the run.",
)
@click.option("--resume", is_flag=True, help="Continue the run of the run folder.")
@click.option(
    "--nproc-per-node",
    type=click.IntRange(min=1),
    help="Processes to start on this machine, 1 if left out; not under torchrun.",
)
@click.argument("overrides", nargs=-1, metavar="[KEY.PATH=VALUE]...")
def train(
    config_path: Path, resume: bool, nproc_per_node: int | None, overrides: Sequence[str]
) -> None:
    """Train the DLRM that the configuration describes.

    KEY.PATH=VALUE sets any value of the configuration, such as train.epochs=3 or
    tables.cross_*.tt_ranks=8.

    Exit codes: 0 done; 2 wrong configuration or command; 3 wrong data; 4 run folder; 5 checkpoint;
    6 the loss diverged; 130 interrupted, with a checkpoint once training had begun; 1 a process
    was killed; 70 an error that should not happen.
    """
    from torchrec_flowtt.train.preflight import prepare

    rank, world_size, _ = launched_world()
    if "TORCHELASTIC_RUN_ID" in os.environ and nproc_per_node is not None:
        raise click.UsageError("--nproc-per-node belongs to torchrun here, before -m")
    if nproc_per_node is not None and nproc_per_node > 1:
        from torchrec_flowtt.train.launch import launch_training

        config = load_config(config_path, overrides)
        prepare(config, nproc_per_node, resume=resume)
        arguments = [f"--config={config_path}", *(["--resume"] if resume else []), *overrides]
        sys.exit(launch_training(arguments, nproc_per_node, config.checkpoint_folder))
    config = load_config(config_path, overrides)
    prepared = prepare(config, world_size, resume=resume, first=rank == 0)
    if rank == 0:
        from torchrec_flowtt.train.run_folder import claim_run_folder

        claim_run_folder(config, resume=resume)
    from torchrec_flowtt.train.job import run_job

    run_job(prepared, resume=resume)


def exit_with(command: Callable[[], object]) -> NoReturn:
    """Runs a command line to its end and leaves with the exit code that its outcome has.

    A :class:`JobError` becomes its one line on standard error. A process that may have joined a
    process group leaves without the interpreter's clean-up: after an error it could wait for ranks
    that wait for this one, and gloo's threads, which release Python objects, abort the process
    when the interpreter is already shutting down.
    """
    try:
        command()
    except JobError as error:
        report_error(error)
        code = error.exit_code
    except click.exceptions.Exit as error:
        code = error.exit_code
    except click.ClickException as error:
        report_error(JobError(f"{error.format_message()} (--help lists the options)"))
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        code = Interrupted.exit_code
    except SystemExit:
        raise
    except BaseException as error:
        if lost_another_process(error):
            # That process, or who started it, has more to say.
            rank, _, _ = launched_world()
            print(f"flowtt: rank {rank} lost another process of the run", file=sys.stderr)
        else:
            traceback.print_exc()
        code = INTERNAL_ERROR
    else:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
