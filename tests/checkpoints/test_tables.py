"""Conversions of tables in checkpoints of both kinds, through the commands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.decomposition.test_tt_rec import RANKS, P, looked_up, theirs
from tests.reference import dense_table
from tests.tolerances import assert_close
from torchrec_flowtt.checkpoints import decompose_checkpoint, import_tt_rec
from torchrec_flowtt.cli.main import flowtt
from torchrec_flowtt.config import CheckpointError
from torchrec_flowtt.shapes import TTSpec

SPEC = TTSpec.suggest(53, 8, tt_ranks=(3, 2))
BAGS = "sparse.embedding_bags"
KINDS = ["folder", "file.pt"]


def table() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    cores = [torch.randn(shape, generator=generator) for shape in SPEC.core_shapes]
    return dense_table(cores)[:53].float()


def state() -> dict:
    """With another table, whose name begins alike, and the optimizer's state of both."""
    weights = {f"{BAGS}.ads.weight": table(), f"{BAGS}.ads_2.weight": torch.rand(4, 8)}
    optimizer = {
        key: {f"{key.split('.')[2]}.momentum1": torch.rand_like(value), "lr": 0.5}
        for key, value in weights.items()
    }
    rest = {"over.weight": torch.rand(3, 3), "step": torch.tensor(7)}
    return {"model": {**weights, **rest}, "optimizer": {"state": optimizer}, "epoch": 3}


def write(path: Path, content: dict) -> Path:
    if path.suffix:
        torch.save(content, path)
    else:
        dcp.save(content, checkpoint_id=path, no_dist=True)
    return path


def read(path: Path) -> dict:
    if path.suffix:
        return torch.load(path, weights_only=True)
    dcp_to_torch_save(path, path.with_suffix(".pt"))
    return torch.load(path.with_suffix(".pt"), weights_only=True)


def run(*arguments: object, code: int = 0) -> str:
    """What a command prints, or why it fails; a CheckpointError has the exit code 5."""
    result = CliRunner().invoke(flowtt, [str(argument) for argument in arguments])
    if isinstance(result.exception, CheckpointError):
        assert code == CheckpointError.exit_code == 5, result.exception
        return str(result.exception)
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_to_cores_and_back(tmp_path: Path, source: str, target: str) -> None:
    before = state()
    first = write(tmp_path / source, before)
    second = tmp_path / f"tt_{target}"
    output = run("decompose", first, second, "--table=ads", "--tt-ranks=3,2")
    assert f"model.{BAGS}.ads.weight: 53 x 8" in output and "relative error" in output
    assert "left out: 2 entries of the optimizer for these tables" in output
    middle = read(second)
    cores = [middle["model"].pop(f"{BAGS}.ads.tt_cores.{k}") for k in range(3)]
    assert [tuple(core.shape) for core in cores] == list(SPEC.core_shapes)
    assert_close(dense_table(cores)[:53].float(), table().double(), "table", slack=4)
    # All else is as it was.
    del before["model"][f"{BAGS}.ads.weight"]
    del before["optimizer"]["state"][f"{BAGS}.ads.weight"]
    assert middle.keys() == before.keys() and middle["epoch"] == 3
    assert middle["optimizer"]["state"].keys() == before["optimizer"]["state"].keys()
    assert middle["optimizer"]["state"][f"{BAGS}.ads_2.weight"]["lr"] == 0.5
    assert middle["model"].keys() == before["model"].keys()
    for key, value in before["model"].items():
        assert torch.equal(middle["model"][key], value), key

    third = tmp_path / "back.pt"
    run("reconstruct", second, third, "--table", "ads", 53, "--dtype=float16")
    weight = read(third)["model"][f"{BAGS}.ads.weight"]
    assert weight.dtype == torch.float16 and weight.shape == (53, 8)
    assert_close(weight, table().double(), "table")
    left = [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert left == []  # nothing temporary


def test_flat_keys_of_the_training_job(tmp_path: Path) -> None:
    flat = {f"model/{BAGS}.ads.weight": table()}
    flat[f"optimizer/{BAGS}.ads.weight/ads.momentum1"] = torch.rand(53)
    flat["optimizer/over.weight/sum"] = torch.rand(2)
    found = decompose_checkpoint(
        write(tmp_path / "one", flat),
        tmp_path / "two.pt",
        {"ads": {"tt_ranks": 4}},
        dtype=torch.bfloat16,
    )
    assert found.dropped == (f"optimizer/{BAGS}.ads.weight/ads.momentum1",)
    assert found.tables[0].spec == TTSpec.suggest(53, 8, tt_ranks=4)
    after = read(tmp_path / "two.pt")
    expected = {f"model/{BAGS}.ads.tt_cores.{k}" for k in range(3)}
    assert set(after) == {*expected, "optimizer/over.weight/sum"}
    assert after[f"model/{BAGS}.ads.tt_cores.0"].dtype == torch.bfloat16


def test_cores_of_tt_rec(tmp_path: Path) -> None:
    cores = theirs(3, tables=2)
    content = {f"emb.tt_cores.{k}": core for k, core in enumerate(cores)}
    content["emb.cache_state"] = torch.full((60,), -1)
    source = write(tmp_path / "tt_rec.pt", content)
    options = ["--table=ads", "--tt-ranks=4,3", "--num-embeddings=57", "--source-prefix=emb."]
    options += ["--source-table=1", f"--prefix=model.{BAGS.removesuffix('embedding_bags')}"]
    run("import-tt-rec", source, tmp_path / "folder", *options)
    keys = [f"{BAGS}.ads.tt_cores.{k}" for k in range(3)]
    shapes = [(p, r, q, s) for p, r, q, s in zip(P, RANKS, (2, 3, 2), (4, 3, 1), strict=False)]
    loaded = {key: torch.empty(s).double() for key, s in zip(keys, shapes, strict=True)}
    dcp.load({"model": loaded}, checkpoint_id=tmp_path / "folder", no_dist=True)
    dense = dense_table([loaded[key] for key in keys])
    for row in (0, 23, 56):
        expected = torch.tensor(looked_up(cores, 1, row), dtype=torch.float64)
        torch.testing.assert_close(dense[row], expected, rtol=1e-12, atol=1e-12)

    content["emb.cache_state"][4] = 0
    source = write(tmp_path / "cached.pt", content)
    assert "rows of emb.tt_cores are in the module's cache" in run(
        "import-tt-rec", source, tmp_path / "x", *options, code=5
    )
    run("import-tt-rec", source, tmp_path / "x", *options, "--ignore-cache")
    with pytest.raises(ValueError, match=r"cached.pt has no tt_cores.0"):
        import_tt_rec(source, tmp_path / "y", "ads", (4, 3), 57)


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (
            5,
            ["--table=adds", "--tt-ranks=2"],
            "of 'adds' under embedding_bags or embeddings",
        ),
        (2, ["--table=ads"], "one of --tt-ranks and --max-bytes is needed"),
        (5, ["--table=ads", "--tt-ranks=2", "--q-shapes=3,3,3"], "must be embedding_dim 8, got 27"),
        (2, ["--table=ads", "--tt-ranks=2,x"], "'2,x' must be integers"),
    ],
)
def test_mistakes_write_nothing(
    tmp_path: Path, code: int, arguments: list[str], message: str
) -> None:
    source = write(tmp_path / "one.pt", state())
    assert message in run("decompose", source, tmp_path / "two", *arguments, code=code)
    assert [path.name for path in tmp_path.iterdir()] == ["one.pt"]


class Foreign:
    """What weights_only=True does not load."""


def test_what_cannot_be_read_or_written(tmp_path: Path) -> None:
    def fails(source: Path, target: Path) -> str:
        return run("decompose", source, target, "--table=ads", "--tt-ranks=2", code=5)

    good = write(tmp_path / "one.pt", state())
    assert "one.pt exists already" in fails(good, good)
    assert "nowhere is no folder" in fails(good, tmp_path / "nowhere" / "two")
    bad = write(tmp_path / "bad.pt", {**state(), "object": Foreign()})
    assert "cannot be read by torch.load with weights_only=True" in fails(bad, tmp_path / "two")
    assert "it has no .metadata" in fails(tmp_path, tmp_path / "two")
    write(tmp_path / "objects", {**state(), "object": Foreign()})
    assert "weights_only=True" in fails(tmp_path / "objects", tmp_path / "two")
    assert not (tmp_path / "two").exists()


def cores_of(*numbers: int) -> dict:
    shapes = dict(enumerate(SPEC.core_shapes))
    return {f"{BAGS}.ads.tt_cores.{k}": torch.rand(shapes[k]) for k in numbers}


@pytest.mark.parametrize(("numbers", "missing"), [((0, 2), 1), ((1, 2), 0)])
def test_a_core_that_is_missing(numbers: tuple[int, ...], missing: int, tmp_path: Path) -> None:
    write(tmp_path / "old.pt", cores_of(*numbers))
    arguments = ("reconstruct", tmp_path / "old.pt", tmp_path / "new.pt", "--table", "ads", 53)
    message = run(*arguments, code=5)
    assert f"table 'ads': core {missing} is missing, the checkpoint has cores " in message
    assert not (tmp_path / "new.pt").exists()


def test_rows_that_do_not_fit_a_dtype(tmp_path: Path) -> None:
    write(tmp_path / "old.pt", {key: 100 * core for key, core in cores_of(0, 1, 2).items()})
    arguments = ("reconstruct", tmp_path / "old.pt", tmp_path / "new.pt", "--table", "ads", 53)
    message = run(*arguments, "--dtype", "float16", code=5)
    assert "torch.float16 holds at most 6.55e+04, got a row of up to " in message
    run(*arguments, "--dtype", "bfloat16")


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.eye(4).to_sparse(), "must be a dense tensor [N, D], got torch.float32 of shape"),
        (torch.empty(4, 4, device="meta"), "torch.strided on meta"),
        ("x", "must be a dense tensor [N, D], got str"),
    ],
)
def test_weights_that_are_no_table(weight: object, message: str, tmp_path: Path) -> None:
    write(tmp_path / "old.pt", {f"{BAGS}.ads.weight": weight})
    arguments = ("decompose", tmp_path / "old.pt", tmp_path / "new.pt", "--table=ads")
    assert message in run(*arguments, "--tt-ranks=2", code=5)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut in half"])
def test_files_that_cannot_be_read(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_bytes(content)
    arguments = ("decompose", tmp_path / "old.pt", tmp_path / "new.pt", "--table=ads")
    message = run(*arguments, "--tt-ranks=2", code=5)
    assert "old.pt cannot be read" in message


def test_tables_of_sequence_collections(tmp_path: Path) -> None:
    """They are found under `embeddings`, and keep that name."""
    write(tmp_path / "old.pt", {"sparse.embeddings.ads.weight": table()})
    run("decompose", tmp_path / "old.pt", tmp_path / "tt.pt", "--table=ads", "--tt-ranks=3,2")
    keys = [f"sparse.embeddings.ads.tt_cores.{k}" for k in range(3)]
    assert sorted(read(tmp_path / "tt.pt")) == keys
    run("reconstruct", tmp_path / "tt.pt", tmp_path / "new.pt", "--table", "ads", 53)
    found = read(tmp_path / "new.pt")["sparse.embeddings.ads.weight"]
    assert_close(found, table().double(), "table", slack=10.0)
