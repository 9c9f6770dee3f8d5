"""``python -m torchrec_flowtt.train``, what torchrun starts."""

from __future__ import annotations

from torchrec_flowtt.train.command import exit_with, train

if __name__ == "__main__":
    exit_with(lambda: train.main(prog_name="flowtt train", standalone_mode=False))
