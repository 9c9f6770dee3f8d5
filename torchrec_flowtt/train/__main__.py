"""``python -m torchrec_flowtt.train``, what torchrun starts."""

from __future__ import annotations

from torchrec_flowtt.train.early_interruption import leave_quietly_on_ctrl_c

if __name__ == "__main__":
    leave_quietly_on_ctrl_c()
    from torchrec_flowtt.train.command import exit_with, train

    exit_with(lambda: train.main(prog_name="flowtt train", standalone_mode=False))
