"""What can be wrong before a run starts: one line, an exit code, nothing touched."""

from __future__ import annotations

import json
import shutil

import pytest
from click.testing import CliRunner

from torchrec_flowtt.config import (
    CheckpointError,
    ConfigError,
    DataError,
    JobError,
    RunFolderError,
    load_config,
)
from torchrec_flowtt.train import command
from torchrec_flowtt.train.checkpoint_files import (
    JobRecord,
    begin_write,
    finish_write,
    latest_checkpoint,
    read_job_record,
)
from torchrec_flowtt.train.preflight import prepare
from torchrec_flowtt.train.progress import Progress
from torchrec_flowtt.train.run_folder import claim_run_folder


@pytest.fixture
def check(config_path, tmp_path):
    """Prepares a run in a folder of its own, with overrides."""

    def prepare_run(*overrides, world_size=2, resume=False):
        config = load_config(config_path, [f"run_folder={tmp_path / 'run'}", *overrides])
        return prepare(config, world_size, resume=resume)

    return prepare_run


def failure(kind: type[JobError], action, *arguments, **named) -> str:
    with pytest.raises(kind) as caught:
        action(*arguments, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_good_configuration_passes(check):
    prepared = check()
    assert {table.name: table.kernel for table in prepared.tables}["cross_user_genre"] == "flowtt"
    assert prepared.progress == Progress()


def test_unknown_table_lists_the_tables(check):
    text = failure(ConfigError, check, 'tables=[{name: "crosses", kernel: fbgemm}]')
    assert "no table matches 'crosses'" in text
    assert "the tables are user, item, age" in text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "tables.0.p_shapes=[8, 8, 8]",
            "product of p_shapes must be at least num_embeddings 4096, got 512",
        ),
        ("tables.0.q_shapes=[2, 2, 3]", "[2, 2, 3] multiply to 12, model.embedding_dim is 8"),
        ("tables.0.tt_ranks=[4, 4, 4]", "q_shapes"),
        ("tables.0.num_cores=2", None),
        ("tables.0={name: cross_user_genre, kernel: flowtt, max_bytes: 8}", "max_bytes"),
    ],
)
def test_impossible_shapes_name_the_table(check, override, expected):
    if expected is None:
        assert check(override).tables[8].spec.tt_ranks == (4,)
        return
    if override.startswith("tables.0.tt_ranks"):
        text = failure(ConfigError, check, override, "tables.0.q_shapes=[2, 2, 2]")
        assert "tables.cross_user_genre" in text
        return
    text = failure(ConfigError, check, override)
    assert "cross_user_genre" in text and expected in text


def test_more_processes_than_tables(check):
    text = failure(ConfigError, check, "train.batch_size=44", world_size=11)
    assert "11 processes are more than the 10 tables" in text


def test_a_batch_that_cannot_be_shared(check):
    text = failure(ConfigError, check, "train.batch_size=41")
    assert "41 is not a multiple of the 2 processes that share it; take 40" in text
    text = failure(ConfigError, check, "train.batch_size=9000")
    assert "9000 is more than the 1201 training examples" in text


def test_a_device_that_is_not_there(check, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "finds no GPU; set device=cpu" in failure(ConfigError, check, "device=cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    text = failure(ConfigError, check, "device=cuda")
    assert "2 processes on this machine need as many GPUs, there are 1" in text


def test_adam_for_fbgemm_tables_on_the_cpu(check):
    text = failure(ConfigError, check, "optimizer.sparse.name=adam")
    assert "FBGEMM has no Adam on the CPU, which table 'user' would need" in text


def test_a_missing_extra_is_named(check, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'torchrec-flowtt[train]'" in failure(ConfigError, check)


def test_missing_data(check, tmp_path):
    text = failure(DataError, check, f"data.path={tmp_path / 'none'}")
    assert "synthetic.inter is missing; data.path needs" in text


def test_a_run_folder_of_another_run_is_left_alone(check, tmp_path):
    other = tmp_path / "run" / "notes.txt"
    other.parent.mkdir()
    other.write_text("mine")
    text = failure(RunFolderError, check)
    assert f"{tmp_path / 'run'} already holds files; give --resume" in text
    assert [path.name for path in other.parent.iterdir()] == ["notes.txt"]


def test_a_checkpoint_folder_of_another_run(check, tmp_path):
    other = tmp_path / "checkpoints"
    other.mkdir()
    (other / "latest").write_text("step-00000001\n")
    text = failure(RunFolderError, check, f"checkpoint.folder={other}")
    assert f"{other} already holds files" in text


def test_nothing_to_resume(check, tmp_path):
    assert "does not exist, so there is nothing to resume" in failure(
        RunFolderError, check, resume=True
    )
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert "no checkpoint in" in failure(CheckpointError, check, resume=True)


def test_an_unwritable_run_folder(config_path, tmp_path):
    (tmp_path / "file").write_text("")
    config = load_config(config_path, [f"run_folder={tmp_path / 'file' / 'run'}"])
    text = failure(RunFolderError, claim_run_folder, config, resume=False)
    assert "cannot be written: Not a directory; set run_folder=..." in text


@pytest.fixture
def saved(check, tmp_path):
    """The folder of a run with a checkpoint whose tensors nobody looks at here."""
    prepared = check()
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    tables = {table.name: table.shape() for table in prepared.tables}
    record = JobRecord(prepared.settings, tables, Progress(epoch=1, global_step=30))
    begin_write(folder, "step-00000030")
    finish_write(folder, "step-00000030", record, keep=2)
    return folder


def test_resume_takes_up_the_progress(check, saved):
    assert check(resume=True).progress.global_step == 30
    assert check("train.epochs=9", "train.log_every=3", resume=True).progress.epoch == 1


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "tables.cross_user_genre.tt_ranks=5",
            "table 'cross_user_genre' has tt_ranks [4, 4], the configuration says [5, 5]",
        ),
        (
            "tables.cross_user_genre.kernel=fbgemm",
            "table 'cross_user_genre' has kernel flowtt, the configuration says fbgemm",
        ),
        ("data.cross_rows=2048", "has num_embeddings 4096, the configuration says 2048"),
        ("seed=2", "was made with seed = 1, the configuration says 2"),
        (
            "optimizer.dense.learning_rate=0.5",
            "was made with optimizer.dense.learning_rate = 0.001, the configuration says 0.5",
        ),
        ("model.over_layers=[4, 1]", "was made with model.over_layers = [8, 1]"),
        ("train.batch_size=20", "was made with train.batch_size = 40"),
    ],
)
def test_checkpoints_of_other_runs_are_refused(check, saved, override, expected):
    before = sorted(path.name for path in saved.iterdir())
    text = failure(CheckpointError, check, override, resume=True)
    assert expected in text and "start another run_folder" in text
    assert sorted(path.name for path in saved.iterdir()) == before


def test_a_checkpoint_of_other_tables(check, saved):
    path = saved / "step-00000030" / "job.json"
    record = json.loads(path.read_text())
    record["tables"]["gone"] = record["tables"].pop("user")
    path.write_text(json.dumps(record))
    text = failure(CheckpointError, check, resume=True)
    assert "has a table 'gone' that this configuration lacks" in text


def test_damaged_checkpoints(check, saved):
    (saved / "step-00000030" / "job.json").write_text("{")
    assert "job.json cannot be read" in failure(CheckpointError, check, resume=True)
    shutil.rmtree(saved / "step-00000030")
    assert "has no job.json" in failure(CheckpointError, check, resume=True)


def test_a_write_that_is_cut_off_leaves_the_previous_checkpoint(saved):
    record = read_job_record(latest_checkpoint(saved))
    (begin_write(saved, "step-00000031") / "half.distcp").write_text("")
    assert latest_checkpoint(saved).name == "step-00000030"
    # The next write clears it away, and the newest two stay.
    for step in (32, 33):
        begin_write(saved, f"step-{step:08d}")
        finish_write(saved, f"step-{step:08d}", record, keep=2)
    names = sorted(path.name for path in saved.iterdir())
    assert names == ["latest", "step-00000032", "step-00000033"]
    assert latest_checkpoint(saved).name == "step-00000033"


@pytest.fixture
def exit_code(monkeypatch, config_path):
    """Runs ``flowtt train`` in this process and returns its exit code."""

    class Left(BaseException):
        pass

    def leave(code):
        raise Left(code)

    monkeypatch.setattr("os._exit", leave)
    monkeypatch.setattr("signal.signal", lambda *_: None)

    def run(*arguments):
        with pytest.raises(Left) as caught:
            command.exit_with(lambda: command.train.main(list(arguments), standalone_mode=False))
        return caught.value.args[0]

    return run


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--config=nowhere.yaml"], 2, "configuration nowhere.yaml: cannot be read"),
        (["train.epoch=1"], 2, "unknown key train.epoch; did you mean train.epochs?"),
        (["--rseume"], 2, "No such option"),
        (["data.path=/nowhere"], 3, "data file /nowhere/synthetic.inter is missing"),
        (["--resume", "run_folder=/nowhere/run"], 4, "nothing to resume"),
        (["run_folder=/dev/null/run"], 4, "cannot be written: Not a directory"),
    ],
)
def test_exit_codes(exit_code, config_path, capsys, arguments, code, expected):
    if not arguments[0].startswith("--config"):
        arguments = [f"--config={config_path}", *arguments]
    assert exit_code(*arguments) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("flowtt: error: ") and expected in lines[0]


def test_missing_checkpoint_is_exit_code_5(exit_code, config_path, tmp_path):
    (tmp_path / "run").mkdir()
    arguments = [f"--config={config_path}", "--resume", f"run_folder={tmp_path / 'run'}"]
    assert exit_code(*arguments) == 5


def test_a_defect_keeps_its_traceback(exit_code, config_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "load_config", lambda *_: 1 / 0)
    assert exit_code(f"--config={config_path}") == 70
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_help_lists_the_exit_codes():
    text = CliRunner().invoke(command.train, ["--help"]).output
    assert "130 interrupted" in text and "--resume" in text
