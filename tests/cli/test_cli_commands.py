"""The console script's commands."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner

from torchrec_flowtt.cli.main import flowtt
from torchrec_flowtt.config import ConfigError, RunFolderError, load_config
from torchrec_flowtt.data.synthetic import write_random_ratings
from torchrec_flowtt.train import demo
from torchrec_flowtt.train.preflight import prepare
from torchrec_flowtt.train.run_lock import lock_folder
from torchrec_flowtt.version import __version__


def test_help_and_version():
    help_text = CliRunner().invoke(flowtt, ["--help"])
    assert help_text.exit_code == 0
    assert "train" in help_text.output and "demo" in help_text.output
    assert __version__ in CliRunner().invoke(flowtt, ["--version"]).output


def test_without_a_command_it_prints_its_help():
    result = CliRunner().invoke(flowtt, [])
    assert result.exit_code == 0
    assert result.output == CliRunner().invoke(flowtt, ["--help"]).output


def summary(**flowtt_run):
    run = {"test_auc": 0.75, "test_log_loss": 0.58, "table_bytes": 1000, "examples_per_second": 10}
    return {"fbgemm": run, "flowtt": {**run, **flowtt_run}}


def test_comparison_tells_the_differences():
    last = demo.comparison(
        summary(test_auc=0.7475, test_log_loss=0.585, table_bytes=10, examples_per_second=5)
    ).splitlines()[-1]
    assert last.split("  ")[0] == "flowtt against fbgemm"
    for part in ("100 times smaller", "-0.0025", "+0.0050", "0.50 times"):
        assert part in last


def test_the_demonstration_removes_nothing_but_its_own_runs(tmp_path):
    folder = tmp_path / "fbgemm"
    folder.mkdir()
    (folder / "metrics.json").write_text("{}")
    (folder / "thesis.tex").write_text("mine")
    with pytest.raises(RunFolderError, match="holds thesis.tex, which no demonstration wrote"):
        demo._clear(folder)
    assert (folder / "metrics.json").exists()


@pytest.fixture
def runs(monkeypatch):
    """Replaces the two trainings by the files that they would leave; returns what was asked."""
    asked = []

    def pretend(config_path, settings, processes):
        values = dict(setting.split("=", 1) for setting in settings)
        asked.append((processes, values))
        folder = demo.Path(values["run_folder"])
        folder.mkdir(parents=True)
        metrics = {**summary()["fbgemm"], "epochs": []}
        metrics["table_bytes"] = 1000 if "tables" in values else 10
        (folder / "metrics.json").write_text(json.dumps(metrics))
        (folder / "config.yaml").write_text(f"run_folder: {folder}")
        return 0

    monkeypatch.setattr(demo, "_run", pretend)
    monkeypatch.setattr(demo, "_check", lambda *_: None)
    return asked


def test_both_runs_differ_in_the_tables_only_and_replace_earlier_ones(runs, tmp_path):
    arguments = ["demo", f"--run-dir={tmp_path / 'demo'}", "--device=cpu", "seed=3"]
    for _ in range(2):
        result = CliRunner().invoke(flowtt, arguments)
        assert result.exit_code == 0, result.output
        assert "100 times smaller" in result.output
    (processes, full), (_, compressed) = runs[:2]
    assert processes == 2
    assert full.pop("tables") == '[{name: "*", kernel: fbgemm}]'
    assert full.pop("run_folder").endswith("fbgemm.new")
    assert compressed.pop("run_folder").endswith("flowtt.new")
    assert full == compressed == {"device": "cpu", "seed": "3"}
    recorded = load_config(tmp_path / "demo" / "flowtt" / "config.yaml")
    assert recorded.run_folder == tmp_path / "demo" / "flowtt"
    names = sorted(path.name for path in (tmp_path / "demo").iterdir())
    assert names == [".lock", "fbgemm", "flowtt", "summary.json"]
    found = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert found["fbgemm"]["table_bytes"] == 1000 and found["flowtt"]["table_bytes"] == 10
    for run in found.values():
        assert {"test_auc", "test_log_loss", "table_bytes", "examples_per_second"} <= run.keys()


def test_a_failed_run_keeps_the_earlier_summary(runs, tmp_path, monkeypatch):
    arguments = ["demo", f"--run-dir={tmp_path / 'demo'}", "--device=cpu"]
    assert CliRunner().invoke(flowtt, arguments).exit_code == 0
    before = (tmp_path / "demo" / "summary.json").read_text()
    monkeypatch.setattr(demo, "_run", lambda *_: 3)
    assert CliRunner().invoke(flowtt, arguments).exit_code == 3
    assert (tmp_path / "demo" / "summary.json").read_text() == before
    assert (tmp_path / "demo" / "fbgemm" / "metrics.json").exists()


@pytest.mark.parametrize("place", [".", "flowtt.new"])
def test_another_demonstration_that_is_alive_keeps_its_folder(runs, tmp_path, place):
    """Of a demonstration that was killed, the processes of a run may be what is alive."""
    folder = tmp_path / "demo" / place
    folder.mkdir(parents=True)
    held = lock_folder(folder)
    if place != ".":
        (folder / "config.yaml").write_text("theirs")
    arguments = ["demo", f"--run-dir={tmp_path / 'demo'}", "--device=cpu"]
    try:
        result = CliRunner().invoke(flowtt, arguments)
    finally:
        os.close(held)
    assert "is in use by another run that is still alive" in str(result.exception)
    assert runs == [] and (place == "." or (folder / "config.yaml").exists())
    assert CliRunner().invoke(flowtt, arguments).exit_code == 0


@pytest.mark.parametrize("place", ["flowtt", "fbgemm", "flowtt.new"])
def test_foreign_files_are_seen_before_the_first_training(runs, tmp_path, place):
    (tmp_path / "demo" / place).mkdir(parents=True)
    (tmp_path / "demo" / place / "thesis.tex").write_text("mine")
    result = CliRunner().invoke(flowtt, ["demo", f"--run-dir={tmp_path / 'demo'}"])
    assert "holds thesis.tex, which no demonstration wrote" in str(result.exception)
    assert runs == []


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.epoch=1", "unknown key train.epoch"),
        ("checkpoint.folder=x", "the two runs of a demonstration cannot share one"),
        ("tables.0.name=none", "no table matches 'none'"),
    ],
)
def test_mistakes_come_before_the_first_training(monkeypatch, tmp_path, override, expected):
    write_random_ratings(tmp_path / "ratings")
    monkeypatch.setattr(demo, "_run", lambda *_: pytest.fail("a training was started"))
    settings = [f"data.path={tmp_path / 'ratings'}", "data.name=synthetic", override]
    result = CliRunner().invoke(flowtt, ["demo", f"--run-dir={tmp_path / 'demo'}", *settings])
    assert isinstance(result.exception, ConfigError)
    assert expected in str(result.exception)


@pytest.mark.slow
def test_a_real_demonstration(tmp_path):
    write_random_ratings(tmp_path / "ratings")
    settings = [f"data.path={tmp_path / 'ratings'}", "data.name=synthetic"]
    settings += ["train.batch_size=40", "data.cross_rows=4096"]
    result = CliRunner().invoke(
        flowtt, ["demo", f"--run-dir={tmp_path / 'demo'}", "--device=cpu", *settings]
    )
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert found["flowtt"]["table_bytes"] < found["fbgemm"]["table_bytes"]
    assert 0.0 < found["flowtt"]["test_auc"] < 1.0
    # Its recorded configuration is one that --resume can be given.
    config = load_config(tmp_path / "demo" / "flowtt" / "config.yaml")
    assert prepare(config, 1, resume=True).progress.epoch == 1
