"""What the small hook says of a node that has changed since the spec that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvct.model import Case, Edits, Pending, ProcEdit, Remainder
from nvct.oci.finish import _why_gone


def case(proc: Path, name: str, minor: int, capability: str) -> Case:
    capabilities = (f"gpu0/mig/{capability}/access",)
    return Case((f"/dev/cap{minor}",), Edits(proc=ProcEdit(str(proc), (), (), capabilities, "")), device=name)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "capabilities/gpu0/mig/gi1").mkdir(parents=True)
    (tmp_path / "capabilities/gpu0/mig/gi1/access").touch()
    return tmp_path


def test_the_containers_own_devices_that_are_gone_are_named(proc: Path) -> None:
    cases = (
        case(proc, "0:0", 1, "gi1"),
        case(proc, "0:1", 2, "gi2"),
        case(proc, "0:2", 3, "gi3"),
        case(proc, "all", 2, "gi2"),
    )
    remainder = Remainder(Edits(), "x86_64", Pending("535.0", cases))
    said = _why_gone(remainder, {"/dev/cap1", "/dev/cap2", "/dev/null"})
    assert said.startswith(": `0:1` of the CDI spec is no longer on this node; run `nvct cdi refresh`")


def test_a_device_that_no_name_of_cdi_can_be_given(proc: Path) -> None:
    remainder = Remainder(Edits(), "x86_64", Pending("535.0", (case(proc, "", 2, "gi2"),)))
    assert _why_gone(remainder, {"/dev/cap2"}).startswith(": a device of the CDI spec is no longer")


def test_the_runtimes_specs_are_made_anew() -> None:
    said = _why_gone(Remainder(Edits(), "x86_64"), set())
    assert "make it again" in said
    assert "cdi" not in said
