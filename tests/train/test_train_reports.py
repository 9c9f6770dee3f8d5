"""Progress where there is no terminal."""

from __future__ import annotations

from torchrec_flowtt.train import reports
from torchrec_flowtt.train.progress import Progress


def test_without_a_terminal_progress_is_a_line_now_and_then(tmp_path, capsys, monkeypatch):
    display = reports.ProgressDisplay(
        tmp_path, total_examples=4000, progress=Progress(examples=1000), enabled=True
    )
    display.epoch(2, 4)
    display.say("the plan")
    display.advance(500)
    assert capsys.readouterr() == ("the plan\n", "")
    monkeypatch.setattr(reports, "SECONDS_BETWEEN_LINES", 0.0)
    display.loss(Progress(global_step=3), 0.5)
    display.advance(500)
    display.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "epoch 2/4: 2,000 of 4,000 examples (50%), loss 0.5000\n"
