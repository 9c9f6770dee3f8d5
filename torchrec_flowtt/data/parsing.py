"""Reads the three tab-separated files into arrays; every complaint names file and line.

The format is that of the MovieLens files in recbole: a header line of ``field:type`` columns, then
one record a line. Of the columns only those named here are read, in whatever order they come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchrec_flowtt.config import DataError

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

INTERACTION_COLUMNS = ("user_id", "item_id", "rating", "timestamp")
ITEM_COLUMNS = ("item_id", "release_year", "class")
USER_COLUMNS = ("user_id", "age", "gender", "occupation", "zip_code")


@dataclass(frozen=True)
class Records:
    """The columns asked for of one file, as text; record n stands on line n + 2."""

    path: Path
    columns: dict[str, list[str]]

    def __len__(self) -> int:
        """Number of records."""
        return len(next(iter(self.columns.values())))

    def fail(self, record: int, reason: str) -> DataError:
        """A :class:`DataError` that names the file and the line of a record."""
        return DataError(f"{self.path}, line {record + 2}: {reason}")

    def numbers(self, column: str) -> Float64Array:
        """One column as finite float64 numbers.

        Raises:
            DataError: a value is no finite number.
        """
        texts = self.columns[column]
        try:
            values = np.array(texts, dtype=np.float64)
        except ValueError:
            values = None
        if values is None or not np.isfinite(values).all():
            for record, text in enumerate(texts):
                try:
                    bad = not np.isfinite(float(text))
                except ValueError:
                    bad = True
                if bad:
                    raise self.fail(record, f"{column} is {text!r}, expected a number")
        assert values is not None
        return values

    def unique_positions(self, column: str) -> dict[str, int]:
        """Token to record number.

        Raises:
            DataError: a token stands on two lines.
        """
        positions: dict[str, int] = {}
        for record, token in enumerate(self.columns[column]):
            if token in positions:
                raise self.fail(
                    record, f"{column} {token} was already on line {positions[token] + 2}"
                )
            positions[token] = record
        return positions

    def look_up(self, column: str, positions: dict[str, int], other: Path) -> Int64Array:
        """The record number in ``other`` of every token of a column.

        Raises:
            DataError: a token is not in ``other``.
        """
        found = [positions.get(token, -1) for token in self.columns[column]]
        array = np.array(found, dtype=np.int64)
        if (array < 0).any():
            record = int(np.argmax(array < 0))
            token = self.columns[column][record]
            raise self.fail(record, f"{column} {token} is not in {other}")
        return array


def read_records(path: Path, columns: Sequence[str]) -> Records:
    """Reads ``columns`` of a tab-separated file with a ``field:type`` header.

    Raises:
        DataError: the file cannot be read or is not UTF-8, lacks a column, has a line with another
            number of fields than its header, has no record, or does not end with a newline (the
            sign of a truncated file).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"data file {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"data file {path}: byte {error.start} is not UTF-8 text") from None
    lines = text.split("\n")
    header = [field.partition(":")[0] for field in lines[0].rstrip("\r").split("\t")]
    missing = [column for column in columns if column not in header]
    if missing:
        raise DataError(
            f"{path}, line 1: no column {missing[0]!r}; expected {', '.join(columns)}"
            f" separated by tabs, found {', '.join(header)}"
        )
    if lines.pop() != "":
        raise DataError(
            f"{path}, line {len(lines) + 1}: the last line has no newline, so the file seems"
            " truncated; fetch it again, or end it with a newline if it is complete"
        )
    rows = [line.rstrip("\r").split("\t") for line in lines[1:]]
    for record, row in enumerate(rows):
        if len(row) != len(header):
            raise DataError(
                f"{path}, line {record + 2}: {len(row)} fields, the header has {len(header)}"
            )
    if not rows:
        raise DataError(f"data file {path}: no record after the header")
    picked = [header.index(column) for column in columns]
    return Records(
        path, {column: [row[k] for row in rows] for column, k in zip(columns, picked, strict=True)}
    )


@dataclass(frozen=True)
class Interactions:
    """All interactions in time order, and the properties of users and items.

    Attributes:
        user, item: [n] int64, positions in the user and item files.
        rating: [n] float64.
        timestamp: [n] float64, seconds since 1970; never decreasing.
        age: [users] float64, years.
        gender, occupation, zip_prefix: [users] int64, positions in the vocabularies.
        release_year: [items] float64; the median of the others where it is not known.
        genres: items' genres as (values int64, offsets int64 [items + 1]).
        vocabulary: the sorted tokens of ``gender``, ``occupation``, ``zip_prefix``, ``genre``.
    """

    user: Int64Array
    item: Int64Array
    rating: Float64Array
    timestamp: Float64Array
    age: Float64Array
    gender: Int64Array
    occupation: Int64Array
    zip_prefix: Int64Array
    release_year: Float64Array
    genres: tuple[Int64Array, Int64Array]
    vocabulary: dict[str, list[str]]

    @property
    def num_users(self) -> int:
        """Users in the user file."""
        return len(self.age)

    @property
    def num_items(self) -> int:
        """Items in the item file."""
        return len(self.release_year)


def read_interactions(folder: Path, name: str) -> Interactions:
    """Reads ``<name>.inter``, ``.item`` and ``.user`` of ``folder``.

    Raises:
        DataError: as :func:`read_records`; a bad number, or a user or item of the interactions
            that the other files lack.
    """
    interactions = read_records(folder / f"{name}.inter", INTERACTION_COLUMNS)
    items = read_records(folder / f"{name}.item", ITEM_COLUMNS)
    users = read_records(folder / f"{name}.user", USER_COLUMNS)
    item_positions = items.unique_positions("item_id")
    user_positions = users.unique_positions("user_id")
    timestamp = interactions.numbers("timestamp")
    # Stable, so that equal seconds keep the file's order on every machine.
    order = np.argsort(timestamp, kind="stable")
    vocabulary: dict[str, list[str]] = {}
    gender = _encode(users.columns["gender"], "gender", vocabulary)
    occupation = _encode(users.columns["occupation"], "occupation", vocabulary)
    prefixes = [zip_code[:3] for zip_code in users.columns["zip_code"]]
    zip_prefix = _encode(prefixes, "zip_prefix", vocabulary)
    bags = [text.split() for text in items.columns["class"]]
    genre_values = _encode([genre for bag in bags for genre in bag], "genre", vocabulary)
    genre_offsets = np.cumsum([0] + [len(bag) for bag in bags], dtype=np.int64)
    return Interactions(
        user=interactions.look_up("user_id", user_positions, users.path)[order],
        item=interactions.look_up("item_id", item_positions, items.path)[order],
        rating=interactions.numbers("rating")[order],
        timestamp=timestamp[order],
        age=users.numbers("age"),
        gender=gender,
        occupation=occupation,
        zip_prefix=zip_prefix,
        release_year=_release_years(items),
        genres=(genre_values, genre_offsets),
        vocabulary=vocabulary,
    )


def _encode(tokens: Sequence[str], name: str, vocabulary: dict[str, list[str]]) -> Int64Array:
    vocabulary[name] = sorted(set(tokens))
    position = {token: k for k, token in enumerate(vocabulary[name])}
    return np.array([position[token] for token in tokens], dtype=np.int64)


def _release_years(items: Records) -> Float64Array:
    """MovieLens leaves the year of a few items empty or writes a word there."""
    years = np.array(
        [float(text) if text.isdecimal() else np.nan for text in items.columns["release_year"]]
    )
    known = years[~np.isnan(years)]
    return np.where(np.isnan(years), np.median(known) if len(known) else 0.0, years)
