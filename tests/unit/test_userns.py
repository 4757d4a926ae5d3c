"""What a process learns about its user namespace, in real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvct import trust, userns
from nvct.node import cache

TREE = Path(__file__).resolve().parents[2]
OVERFLOW = int(Path("/proc/sys/kernel/overflowuid").read_text())

PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
from nvct import trust, userns
from nvct.node import cache
print(json.dumps([userns.is_nested(), userns.outer_uid(), sorted(trust.trusted_owners()), cache.own_run_dir()]))
"""
ASK = [sys.executable, "-c", PROGRAM, str(TREE)]


def answers(*prefix: str) -> list[object]:
    done = subprocess.run([*prefix, *ASK], capture_output=True, text=True)
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(f"no user namespaces here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    found: list[object] = json.loads(done.stdout)
    return found


def run_dir_of(uid: int) -> str:
    if uid == 0:
        return "/run/nvct"
    return f"/run/user/{uid}/nvct" if os.path.isdir(f"/run/user/{uid}") else f"/tmp/nvct-{uid}"


def test_outside() -> None:
    if userns.is_nested():
        pytest.skip("these tests run in a user namespace themselves")
    uid = os.geteuid()
    assert answers() == [False, uid, sorted({0, uid}), run_dir_of(uid)]


def test_as_root_of_a_users_namespace() -> None:
    uid = os.geteuid()
    assert answers("unshare", "--user", "--map-root-user") == [True, uid, [0, OVERFLOW], run_dir_of(uid)]


def test_as_oneself_in_a_namespace() -> None:
    uid = os.geteuid()
    asked = answers("unshare", "--user", "--map-current-user")
    assert asked == [True, uid, sorted({0, uid, OVERFLOW}), run_dir_of(uid)]


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user: needs root")
def test_root_of_an_ordinary_users_namespace() -> None:
    become = ("setpriv", "--reuid=61235", "--regid=61235", "--clear-groups")
    assert answers(*become) == [False, 61235, [0, 61235], "/tmp/nvct-61235"]
    assert answers(*become, "unshare", "--user", "--map-root-user") == [True, 61235, [0, OVERFLOW], "/tmp/nvct-61235"]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives folders away: needs root")
def test_what_shows_up_as_the_overflow_uid_is_roots_in_run_alone(tmp_path: Path) -> None:
    """In a user namespace any stranger has that id, and a stranger can make folders in /tmp."""
    strangers = tmp_path / "strangers"
    strangers.mkdir(mode=0o755)
    os.chown(strangers, OVERFLOW, OVERFLOW)
    status = strangers.stat()
    assert not cache._is_safe(status, str(strangers))
    assert not cache._is_safe(status, cache.RUN_DIR)  # we are in no user namespace


def test_the_overflow_uid_counts_in_run_in_a_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(trust, "trusted_owners", lambda: {0, OVERFLOW})
    folder = os.stat_result((0o040755, 1, 1, 1, OVERFLOW, 0, 0, 0, 0, 0))
    assert cache._is_safe(folder, "/run/nvct")
    assert not cache._is_safe(folder, "/tmp/nvct-1000")
    assert not cache._is_safe(os.stat_result((0o040757, 1, 1, 1, OVERFLOW, 0, 0, 0, 0, 0)), "/run/nvct")
