"""The benchmark itself works: every row runs, every container gets its devices, and README shows its figures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import report
from tests.support.runc import TREE


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Of one round. The benchmark fails where a container has not exactly the nodes that it must get."""
    if os.geteuid() != 0:
        pytest.skip("runc containers with device nodes need root")
    if not all(map(shutil.which, ("runc", "busybox", "cc"))):
        pytest.skip("needs runc, busybox and a C compiler (make setup)")
    figures = tmp_path_factory.mktemp("bench") / "figures.json"
    command = [sys.executable, "-m", "tests.bench.bench", "--rounds", "1", "--json", str(figures)]
    done = subprocess.run(command, cwd=TREE, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(figures.read_text()), printed=done.stdout)


@pytest.mark.engine
def test_one_round_measures_every_row(results: dict) -> None:
    assert results["rounds"] == 1
    assert list(results["cases"]) == ["a", "b", "c", "d", "e", "f"]
    assert results["yardstick_s"] > 0 and results["runc_s"] > results["yardstick_s"]
    for case in results["cases"].values():
        assert case["hook_ratio"] == pytest.approx(case["hook_s"] / results["yardstick_s"])
        assert case["added_ratio"] == pytest.approx(case["added_s"] / results["ordinary_yardstick_s"])
        assert case["title"] in results["printed"]
    assert [case["runs"] for case in results["cases"].values()] == [5, 1, 1, 1, 1, 1]


@pytest.mark.engine
def test_one_round_measures_the_other_carriers(results: dict) -> None:
    others = results["others"]
    assert list(others) == ["state", "create-none", "create-one", "create-many", "cdi-generate", "list"]
    assert [other["goal_ratio"] for other in others.values()] == [0.3, None, 3.0, 4.0, 10.0, None]
    assert [other["runs"] for other in others.values()] == [5, 5, 1, 1, 1, 1]
    for key, other in others.items():
        unit = "ordinary_yardstick_s" if key.startswith("create-") else "yardstick_s"
        assert other["ratio"] == pytest.approx(other["counted_s"] / results[unit])
        assert other["title"] in results["printed"]


@pytest.mark.engine
def test_the_hook_takes_little_memory(results: dict) -> None:
    assert {key: case["peak_kib"] for key, case in results["cases"].items() if case["peak_kib"] > 20 * 1024} == {}


def test_the_recorded_figures_are_whole(results: dict) -> None:
    recorded = json.loads(report.RESULTS.read_text())
    assert recorded.keys() == results.keys() - {"printed"}
    assert recorded["rounds"] >= 20
    for table in ("cases", "others"):
        assert all(row["runs"] >= 20 for row in recorded[table].values())
        assert {key: (row["title"], row["goal_ratio"]) for key, row in recorded[table].items()} == {
            key: (row["title"], row["goal_ratio"]) for key, row in results[table].items()
        }


@pytest.mark.parametrize(("ratio", "missed"), [(99.0, True), (0.0, False)])
def test_a_missed_goal_is_owned_to(ratio: float, missed: bool) -> None:
    recorded = json.loads(report.RESULTS.read_text())
    for case in recorded["cases"].values():
        case["hook_ratio"] = ratio
    for other in recorded["others"].values():
        other["ratio"] = ratio
    section = report.readme_section(recorded)
    assert ("The goals of a, b, c, d, e, f are missed" in section) == missed
    assert ("The goals of `create` are missed" in section) == missed


def test_readme_shows_the_recorded_figures() -> None:
    assert report.in_readme() == report.readme_section(json.loads(report.RESULTS.read_text()))


def test_a_machine_is_named() -> None:
    machine = json.loads(report.RESULTS.read_text())["machine"]
    assert all(machine[name] for name in ("cpu", "cores", "kernel", "python"))
    assert machine["python"] in Path(report.README).read_text()
