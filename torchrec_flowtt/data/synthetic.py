"""Made-up ratings in the format of the MovieLens files, to try the job without any download."""

from __future__ import annotations

from pathlib import Path

import numpy as np

GENRES = ("Action", "Comedy", "Drama", "Horror", "Thriller")
OCCUPATIONS = ("artist", "engineer", "librarian", "student")


def write_random_ratings(
    folder: Path,
    *,
    name: str = "synthetic",
    users: int = 40,
    items: int = 60,
    ratings: int = 2000,
    seed: int = 0,
) -> None:
    """Writes ``<name>.inter``, ``.item`` and ``.user`` into ``folder``; set ``data.path`` to it.

    A rating is 3 plus a user's and an item's own inclination plus noise, so that a model has
    something to learn. No user rates an item twice, and several ratings share a second.

    Args:
        folder: made if it is not there.
        name: stem of the files, ``data.name``.
        users: how many users.
        items: how many items.
        ratings: how many interactions, at most ``users * items``.
        seed: the same files for the same seed.
    """
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token"]
    for user in range(1, users + 1):
        age, zip_code = random.integers(10, 80), random.integers(0, 100_000)
        gender, occupation = random.choice(["F", "M"]), random.choice(OCCUPATIONS)
        lines.append(f"{user}\t{age}\t{gender}\t{occupation}\t{zip_code:05d}")
    _write(folder / f"{name}.user", lines)
    lines = ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"]
    for item in range(1, items + 1):
        genres = random.choice(GENRES, size=random.integers(1, 4), replace=False)
        year = random.integers(1930, 1998)
        lines.append(f"{item}\tFilm {item}\t{year}\t{' '.join(genres)}")
    _write(folder / f"{name}.item", lines)
    pairs = random.choice(users * items, size=ratings, replace=False)
    taste, quality = random.normal(size=users), random.normal(size=items)
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    for pair in pairs:
        user, item = divmod(int(pair), items)
        rating = np.clip(np.rint(3.5 + taste[user] + quality[item] + random.normal() / 2), 1, 5)
        second = 880_000_000 + 10 * random.integers(0, ratings)
        lines.append(f"{user + 1}\t{item + 1}\t{int(rating)}\t{second}")
    _write(folder / f"{name}.inter", lines)


def _write(path: Path, lines: list[str]) -> None:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
