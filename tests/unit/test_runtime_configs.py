"""The files for systemd and udev: systemd understands them, they name one another, and nothing restarts for ever."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CONFIGS = Path(__file__).parents[2] / "runtime-configs"
UNITS = sorted((CONFIGS / "systemd").iterdir())
RULES = sorted((CONFIGS / "udev").iterdir())


def unit(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # systemd's names have capitals
    parser.read(path)
    return parser


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    for path in UNITS:
        text = path.read_text().replace("/usr/local/bin/nvct cdi", "/usr/bin/env nvct cdi")  # nvct need not be there
        (tmp_path / path.name).write_text(text)
    units = [str(tmp_path / path.name) for path in UNITS]
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True)
    complaints = [line for line in done.stderr.splitlines() if "nvct" in line]
    assert (done.returncode, complaints) == (0, [])


@pytest.mark.parametrize("path", [path for path in UNITS if path.suffix == ".service"], ids=lambda path: path.name)
def test_no_service_restarts_for_ever(path: Path) -> None:
    found = unit(path)
    restart = found["Service"].get("Restart", "no")
    limits = found["Unit"].getint("StartLimitIntervalSec"), found["Unit"].getint("StartLimitBurst")
    assert restart in ("no", "on-failure")
    assert all(limits)
    # As many starts as are allowed have to fit into the interval, or the limit is never reached.
    pause = found["Service"].getint("RestartSec", 0)
    assert pause * (limits[1] or 0) < (limits[0] or 0)


def test_what_they_name_is_there() -> None:
    names = {path.name for path in UNITS}
    said = "\n".join(path.read_text() for path in (*UNITS, *RULES))
    named = set(re.findall(r"(?:Unit=|restart )(nvct-[\w.-]+)", said))
    assert named == {"nvct-cdi-refresh.service"}
    assert named <= names


def test_a_machine_without_a_driver_is_no_failed_service() -> None:
    service = unit(CONFIGS / "systemd/nvct-cdi-refresh.service")["Service"]
    assert service["SuccessExitStatus"] == "3"
    assert service["Type"] == "oneshot"
