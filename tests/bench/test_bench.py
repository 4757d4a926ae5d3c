"""The benchmark itself works: every row runs, and the figures are written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).with_name("bench.py")


@pytest.mark.engine
@pytest.mark.skipif(os.geteuid() != 0, reason="runc containers with device nodes need root")
@pytest.mark.skipif(
    not shutil.which("runc") or not shutil.which("busybox"), reason="needs runc and busybox (make setup)"
)
def test_one_round_measures_every_row(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(BENCH), "--rounds", "1", "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    result = json.loads(figures.read_text())
    assert result["rounds"] == 1
    assert len(result["median_s"]) == 7 and min(result["median_s"].values()) > 0
    assert list(result["added_ratio"]) == [name for name in result["median_s"] if "+ hook" in name]
