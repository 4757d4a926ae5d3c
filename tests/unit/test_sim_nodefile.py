"""Node files: what they can state, and errors that name the file, the key and what was expected."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvct.errors import ConfigError, NvctError
from nvct.sim.nodefile import spec_from_yaml
from nvct.sim.spec import NvmlBehaviour

EVERYTHING = """
driver: 550.163.01
cuda: 12.4
libraries: 550.54.14
open_module: true
gpus:
- {card: l40s, uuid: GPU-00112233-4455-6677-8899-aabbccddeeff, minor: 3, bus_id: "0000:b7:00.0", memory_mib: 1000}
- {card: a100-40, model: "Odd, model: x", brand: GEFORCE, compute_capability: 8.6, mig: [1g.5gb, 3g.20gb@4]}
fabric_manager: true
nvswitches: 2
imex_channels: 1
gds: 3
rdma: 2
gdrcopy: true
nvml: {init: timeout, delay_s: 0.5}
majors: {nvidia-uvm: 500}
missing: ["usr/lib/*/libcuda.so*"]
unreadable: [usr/bin/nvidia-smi]
links: {"usr/lib64/x": "/nowhere"}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "node.yaml"
    path.write_text(text)
    return path


def test_a_file_can_state_everything(tmp_path: Path) -> None:
    spec = spec_from_yaml(write(tmp_path, EVERYTHING))
    first, second = spec.gpus
    assert (spec.driver, spec.cuda, spec.library_version, spec.open_module) == (
        "550.163.01",
        "12.4",
        "550.54.14",
        True,
    )
    assert (first.minor, first.bus_id, first.card.memory_mib, first.mig) == (3, "00000000:B7:00.0", 1000, None)
    assert (second.card.model, second.card.brand, second.card.compute_capability) == ("Odd, model: x", "GEFORCE", "8.6")
    assert (second.minor, second.mig) == (1, ("1g.5gb", "3g.20gb@4"))
    assert (spec.fabric_manager, spec.nvswitches, spec.imex_channels) == (True, 2, 1)
    assert (spec.gds, spec.rdma, spec.gdrcopy) == (3, 2, True)
    assert (spec.nvml, spec.majors) == (NvmlBehaviour("timeout", 0.5), {"nvidia-uvm": 500})
    assert (spec.missing, spec.unreadable, spec.links) == (
        ("usr/lib/*/libcuda.so*",),
        ("usr/bin/nvidia-smi",),
        {"usr/lib64/x": "/nowhere"},
    )


def test_a_profile_gives_what_is_not_stated(tmp_path: Path) -> None:
    spec = spec_from_yaml(write(tmp_path, "profile: h100\ndriver: 535.183.06\nnvswitches: 0\n"))
    assert (len(spec.gpus), spec.cuda, spec.nvswitches, spec.fabric_manager) == (8, "12.2", 0, True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "holds a list"),
        ("", "holds nothing"),
        ("a: [", "cannot be read as a node file"),
        ("cuda: 12.4", "must state `driver` and `gpus`"),
        ("profile: dgx", "profile is 'dgx'; expected one of dgx-a100"),
        ("profile: t4\ngpu: []", "unknown key 'gpu'"),
        ("profile: t4\ndriver: new", "driver is 'new'; expected a version"),
        ("profile: t4\nopen_module: 1", "open_module is 1; expected true or false"),
        ("profile: t4\nnvml: {init: broken}", "nvml: init is 'broken'; expected one of ok"),
        ("profile: t4\nnvml: {delay_s: -1}", "nvml: delay_s is -1; expected seconds"),
        ("profile: t4\nnvml: {dealy_s: 1}", "nvml: unknown key 'dealy_s'"),
        ("profile: t4\nmajors: {drm: 4}", "'drm' is no major of the driver"),
        ("profile: t4\nmajors: {nvidia-uvm: 512}", "expected a whole number from 0 to 511"),
        ("profile: t4\nmissing: ['../x']", "'../x' must be relative"),
        ("profile: t4\nlinks: {/etc/x: y}", "'/etc/x' must be relative"),
        ("profile: t4\ngpus: [{minor: 1}]", "gpus[0] states no `card`"),
        ("profile: t4\ngpus: [{card: t4, uuid: GPU-1}]", "gpus[0]: uuid is 'GPU-1'"),
        ("profile: t4\ngpus: [{card: t4, bus_id: x}]", "gpus[0]: bus_id is 'x'"),
        ("profile: t4\ngpus: [{card: t4, minor: 254}]", "gpus[0]: minor is 254"),
        ("profile: t4\ngpus: [{card: t4, minor: 5}, {card: t4, minor: 5}]", "two GPUs have the minor 5"),
        ("profile: t4\ngpus: [{card: t4, wings: 2}]", "gpus[0]: unknown key 'wings'"),
        ("profile: t4\ngpus: {}", "gpus is {}; expected a list"),
    ],
)
def test_errors_name_the_key_and_what_was_expected(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        spec_from_yaml(path)
    assert said in str(refused.value)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml cannot be read"):
        spec_from_yaml(tmp_path / "absent.yaml")


_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
_values = st.recursive(
    _scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=8), v, max_size=3)
)
_keys = st.sampled_from(["driver", "cuda", "gpus", "nvml", "majors", "missing", "links", "nvswitches", "open_module"])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(_keys, _values))
def test_any_file_is_a_node_or_an_explained_error(tmp_path: Path, document: dict[str, object]) -> None:
    import yaml

    path = write(tmp_path, yaml.safe_dump({"profile": "t4", **document}, allow_unicode=True))
    try:
        spec = spec_from_yaml(path)
    except NvctError as error:
        assert str(path) in str(error)
    else:
        assert spec.driver
