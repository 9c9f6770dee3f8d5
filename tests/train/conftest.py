"""Made-up ratings and a small configuration for the job's tests."""

from __future__ import annotations

import pytest

from tests.train.job_runs import CONFIG
from torchrec_flowtt.data.synthetic import write_random_ratings


@pytest.fixture(scope="session")
def ratings(tmp_path_factory):
    """Folder of the files of 1,500 made-up ratings."""
    folder = tmp_path_factory.mktemp("ratings")
    write_random_ratings(folder, ratings=1500)
    return folder


@pytest.fixture(scope="session")
def config_path(tmp_path_factory, ratings):
    """The small configuration as a file."""
    path = tmp_path_factory.mktemp("config") / "small.yaml"
    path.write_text(CONFIG.replace("data: {", f"data: {{path: {ratings}, "))
    return path
