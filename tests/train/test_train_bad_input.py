"""What can be wrong before a run starts: one line, an exit code, nothing touched."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys

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
from torchrec_flowtt.train.checkpoint_sums import write_sums
from torchrec_flowtt.train.preflight import prepare
from torchrec_flowtt.train.progress import Progress
from torchrec_flowtt.train.run_folder import claim_run_folder, config_text
from torchrec_flowtt.train.run_lock import check_unlocked
from torchrec_flowtt.train.tables import table_warnings


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


def test_what_an_untrained_run_left_is_no_obstacle(check, config_path, tmp_path):
    folder = tmp_path / "run"
    config = load_config(config_path, [f"run_folder={folder}"])
    (folder / "tensorboard").mkdir(parents=True)
    (folder / "checkpoints" / ".writing-step-00000030").mkdir(parents=True)
    (folder / "config.yaml").write_text(config_text(config))
    (folder / "tensorboard" / "events.out.tfevents.1.host").write_text("")
    check()
    text = failure(CheckpointError, check, resume=True)
    assert "so there is nothing to resume; start without --resume" in text
    for foreign in ("notes.txt", "tensorboard/notes.txt", "checkpoints/latest", "metrics.json"):
        (folder / foreign).write_text("mine")
        assert "already holds files" in failure(RunFolderError, check)
        (folder / foreign).unlink()
    # A configuration that a person wrote would be overwritten.
    (folder / "config.yaml").write_text("# mine\n" + config_text(config))
    assert "already holds files" in failure(RunFolderError, check)


def test_a_run_with_its_checkpoints_elsewhere_is_no_false_start(check, config_path, tmp_path):
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    overrides = [f"run_folder={folder}", f"checkpoint.folder={elsewhere}"]
    for place in (folder, elsewhere):
        place.mkdir()
    (folder / "config.yaml").write_text(config_text(load_config(config_path, overrides)))
    check()
    (elsewhere / "latest").write_text("step-00000001\n")
    assert "already holds files" in failure(RunFolderError, check)


@pytest.mark.parametrize("shared", ["run_folder", "checkpoint.folder"])
@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_of_a_live_run_is_refused(check, tmp_path, shared, resume):
    folder = tmp_path / "locked"
    folder.mkdir()
    (folder / ".lock").write_text("12345\n")
    (tmp_path / "run").mkdir()
    with (folder / ".lock").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = failure(RunFolderError, check, f"{shared}={folder}", resume=resume)
        assert f"{folder} is in use by another run that is still alive (process 12345)" in text
        assert [path.name for path in folder.iterdir()] == [".lock"]
    if not resume:
        check(f"{shared}={folder}")


def test_the_lock_lasts_as_long_as_the_process(config_path, tmp_path):
    """Also when both folders are the same one."""
    overrides = [f"run_folder={tmp_path / 'run'}", f"checkpoint.folder={tmp_path / 'run'}"]
    code = (
        "import sys; from torchrec_flowtt.config import load_config;"
        "from torchrec_flowtt.train.run_folder import claim_run_folder;"
        f"claim_run_folder(load_config({str(config_path)!r}, {overrides!r}), resume=False);"
        "print('claimed', flush=True); sys.stdin.read()"
    )
    config = load_config(config_path, overrides)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "claimed\n"
        text = failure(RunFolderError, claim_run_folder, config, resume=True)
        assert f"still alive (process {process.pid})" in text
        process.kill()
    check_unlocked(config)


def test_row_wise_on_the_cpu(check):
    text = failure(ConfigError, check, "tables.3.sharding=row_wise")
    assert "tables.*.sharding: TorchRec shards row_wise on CUDA only, and table 'user'" in text


def test_a_split_of_one_kind_has_no_auc(check):
    text = failure(DataError, check, "data.positive_rating=0")
    assert "examples of the train split are positive, so there is no AUC" in text
    text = failure(DataError, check, "data.positive_rating=9")
    assert "are negative, so there is no AUC; set another data.positive_rating" in text


def test_useless_compression_is_warned_of(check):
    assert table_warnings(check().tables) == []
    lines = table_warnings(check("tables.0.tt_ranks=[4, 200]").tables)
    assert len(lines) == 1
    assert lines[0].startswith("table 'cross_user_genre': tt_ranks [4, 200] are more than [32, 3")
    lines = table_warnings(check("tables.0.tt_ranks=100", "data.cross_rows=256").tables)
    assert len(lines) == 1 and "lower its tt_ranks or use kernel fbgemm" in lines[0]


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
    sharding = {table.name: "table_wise" for table in prepared.tables}
    sharding["cross_occupation_age_item"] = sharding["gender"] = "data_parallel"
    record = JobRecord(prepared.settings, tables, Progress(epoch=1, global_step=30), sharding)
    temporary = begin_write(folder, "step-00000030")
    (temporary / "__0_0.distcp").write_bytes(bytes(range(256)) * 64)
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
    write_sums(path.parent)
    text = failure(CheckpointError, check, resume=True)
    assert "has a table 'gone' that this configuration lacks" in text


def zero_4096_bytes(path):
    content = bytearray(path.read_bytes())
    content[4096:8192] = bytes(4096)
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        zero_4096_bytes,
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        lambda path: (path.unlink(), path.mkdir()),
    ],
)
@pytest.mark.parametrize("name", ["__0_0.distcp", "job.json", "SHA256SUMS"])
def test_any_damage_names_the_file_and_the_way_back(check, saved, damage, name):
    path = saved / "step-00000030" / name
    if damage is zero_4096_bytes and name != "__0_0.distcp":
        path.write_bytes(bytes(len(path.read_bytes())))
    else:
        damage(path)
    text = failure(CheckpointError, check, resume=True)
    assert f"{saved / 'step-00000030'} is damaged: " in text
    assert "start again in another run_folder" in text
    assert name in text or name == "SHA256SUMS"
    (saved / "step-00000020").mkdir()
    text = failure(CheckpointError, check, resume=True)
    assert f"write step-00000020 into {saved / 'latest'}" in text


def test_sums_can_be_checked_by_hand(saved):
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=saved / "step-00000030")
    assert done.returncode == 0


@pytest.mark.parametrize("name", ["", "../other", "/tmp", ".", "checkpoints/step-00000030"])
def test_latest_holds_a_plain_name(check, saved, name):
    (saved / "latest").write_text(f"{name}\n")
    text = failure(CheckpointError, check, resume=True)
    assert f"must hold the name of a step-* folder beside it, not {name!r}" in text


@pytest.mark.parametrize(
    ("table", "was", "now"),
    [("gender", "data_parallel", "table_wise"), ("user", "table_wise", "data_parallel")],
)
def test_another_sharding_names_the_table(check, saved, table, was, now):
    rules = [{"name": table, "sharding": now}]
    for cross in ("cross_user_genre", "cross_occupation_age_item"):
        rules.append({"name": cross, "kernel": "flowtt", "tt_ranks": 4})
    text = failure(CheckpointError, check, f"tables={json.dumps(rules)}", resume=True)
    assert f"table {table!r} was sharded {was}, the configuration says {now}" in text
    rules[0]["sharding"] = "auto"
    prepared = check(f"tables={json.dumps(rules)}", resume=True)
    assert prepared.sharding[table] == was


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


def test_torchrun_counts_the_processes_itself(exit_code, config_path, capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert exit_code(f"--config={config_path}", "--nproc-per-node=1") == 2
    assert "--nproc-per-node belongs to torchrun here" in capsys.readouterr().err


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
