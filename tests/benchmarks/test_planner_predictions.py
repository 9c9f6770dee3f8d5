from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import planner_predictions  # noqa: E402

FOLDER = ROOT / "docs/performance/h200"


def test_the_page_is_that_of_the_records(tmp_path: Path) -> None:
    folder = tmp_path / "h200"
    folder.mkdir()
    for name in ("lookup.json", "lookup_times.json"):
        shutil.copy(FOLDER / name, folder)
    assert planner_predictions.main([str(folder)]) == 0
    found = json.loads((folder / "planner.json").read_text())
    kept = json.loads((FOLDER / "planner.json").read_text())
    assert found["random_tables"] == kept["random_tables"]
    tt = [row for row in found["workloads"] if row["contender"] == "flowtt"]
    assert tt == [row for row in kept["workloads"] if row["contender"] == "flowtt"]
    page = (tmp_path / "h200_planner.md").read_text()
    for row in tt:
        assert f"{row['predicted_forward_us']:.1f} (" in page
