"""Explanations say what the plan does, all of it, once, and with a reason; and a command line that prints them."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from nvct import model
from nvct.cli.main import cli
from nvct.errors import DriverError, NvctError, RequestError
from nvct.explain import CARRIERS, REMARKS, Explanation, changes_of, explain, groups, summary, to_json
from nvct.inject import running
from nvct.inject.running import CHECKS
from nvct.model import (
    BINARY,
    FIRMWARE,
    LIBRARY,
    LIBRARY32,
    SOCKET,
    Ask,
    CacheEdit,
    DeviceNode,
    DriverFile,
    Edits,
    Gpu,
    Inventory,
    LinkEdit,
    MigDevice,
    MountEdit,
    Request,
    Roots,
)
from nvct.node.saved import inventory_to_json
from nvct.plan import plan
from nvct.record import as_dict, replace
from nvct.request import request_from_env
from nvct.settings import CAPABILITIES, Settings

SMALL = MigDevice(0, "MIG-11111111-0000-5000-8000-000000000001", "1g.5gb", 7, 0, 4864, 66, 67)
LARGE = MigDevice(1, "MIG-22222222-0000-5000-8000-000000000002", "3g.20gb", 2, 0, 19968, 21, 22)


def gpu(index: int, uuid: str, minor: int, bus: str, **more: Any) -> Gpu:
    return Gpu(index, uuid, minor, f"00000000:{bus}:00.0", "NVIDIA A100-SXM4-40GB", "Nvidia", "8.0", 40960, **more)


LIBRARIES = "/usr/lib/x86_64-linux-gnu"
VERSION = "550.163.01"
INVENTORY = Inventory(
    driver_version=VERSION,
    cuda_version="12.4",
    architecture="x86_64",
    roots=Roots(root="/node", dev_root="/node", proc_root="/node/proc"),
    majors={"nvidia": 195, "nvidia-uvm": 234, "nvidia-caps": 235},
    gpus=(
        gpu(0, "GPU-aaaaaaaa-1111-4111-8111-111111111111", 2, "47", mig_enabled=True, mig_devices=(SMALL, LARGE)),
        gpu(1, "GPU-bbbbbbbb-2222-4222-8222-222222222222", 0, "07"),
    ),
    nodes=(DeviceNode("/dev/nvidiactl", 195, 255), DeviceNode("/dev/nvidia-uvm", 234, 0)),
    files=(
        DriverFile(LIBRARY, "compute", f"{LIBRARIES}/libcuda.so.{VERSION}", "libcuda.so.1", ("libcuda.so",)),
        DriverFile(LIBRARY, "utility", f"{LIBRARIES}/libnvidia-ml.so.{VERSION}", "libnvidia-ml.so.1"),
        DriverFile(LIBRARY, "graphics", f"{LIBRARIES}/libGLX_nvidia.so.{VERSION}", "libGLX_nvidia.so.0"),
        DriverFile(LIBRARY, "graphics", f"{LIBRARIES}/libnvidia-glcore.so.{VERSION}", f"libnvidia-glcore.so.{VERSION}"),
        DriverFile(LIBRARY32, "compute", f"/usr/lib/i386-linux-gnu/libcuda.so.{VERSION}", "libcuda.so.1"),
        DriverFile(BINARY, "utility", "/usr/bin/nvidia-smi"),
        DriverFile(FIRMWARE, "utility", f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"),
        DriverFile(SOCKET, "utility", "/run/nvidia-persistenced/socket"),
    ),
    missing=("libnvidia-encode.so.1: no video encoding in containers",),
)

# Kinds of changes for which one reason holds, and which therefore carry none of their own.
WITHOUT_A_REASON = {"env", "stale"}
KINDS = [name for name in as_dict(Edits()) if name not in REMARKS]
EDIT_CLASSES = [value for name, value in vars(model).items() if name.endswith("Edit")]

TOKENS = st.sampled_from(
    ["0", "1", "9", "0:0", "0:1", "0:7", "all", "none", "void", "GPU-bbbbbbbb", SMALL.uuid, "foo", "nvidia.com/gpu=1"]
)
ENVIRONMENTS = st.fixed_dictionaries(
    {},
    optional={
        "NVIDIA_VISIBLE_DEVICES": st.lists(TOKENS, max_size=3).map(",".join),
        "NVIDIA_DRIVER_CAPABILITIES": st.lists(st.sampled_from([*CAPABILITIES, "all", "nothing"]), max_size=4).map(
            ",".join
        ),
        "NVIDIA_REQUIRE_CUDA": st.sampled_from(["cuda>=12.0", "cuda>=99.0", "cuda", ""]),
        "CUDA_VERSION": st.sampled_from(["11.0", "13.0"]),
        "NVIDIA_MIG_CONFIG_DEVICES": st.sampled_from(["all", ""]),
        "NVIDIA_GDS": st.just("enabled"),
        "DOCKER_RESOURCE_GPU": TOKENS,
    },
)
REQUESTS = st.builds(lambda env, privileged: request_from_env(env, privileged=privileged), ENVIRONMENTS, st.booleans())
SETTINGS = st.builds(
    Settings,
    cgroups=st.booleans(),
    mask_proc=st.booleans(),
    disable_require=st.booleans(),
    supported_capabilities=st.sampled_from([CAPABILITIES, ("compute", "utility"), ("utility",), ()]),
    swarm_resource=st.sampled_from([(), ("DOCKER_RESOURCE_GPU",)]),
    unprivileged_env=st.sampled_from(["accept", "ignore", "refuse"]),
)


def explained(*tokens: str, settings: Settings = Settings(), **env: str) -> Explanation:  # noqa: B008 - immutable
    return explain(INVENTORY, request_from_env({"NVIDIA_VISIBLE_DEVICES": ",".join(tokens), **env}), settings)


@given(request=REQUESTS, settings=SETTINGS)
def test_an_explanation_never_contradicts_the_plan(request: Request, settings: Settings) -> None:
    told = to_json(explain(INVENTORY, request, settings))
    try:
        edits = plan(INVENTORY, request, settings)
    except NvctError as error:
        assert (told["refusal"], told["changes"]) == (str(error), [])
        return
    assert told["refusal"] is None
    assert told["warnings"] == list(edits.warnings)
    assert told["left_out"][: len(edits.left_out)] == as_dict(edits.left_out)
    assert Counter(map(text, told["changes"])) == Counter(map(text, planned(edits)))
    assert all(change["why"].strip() for change in told["changes"])
    names = [(change["kind"], change["what"]) for change in told["changes"]]
    assert len(set(names)) == len(names)


def planned(edits: Edits) -> list[dict[str, Any]]:
    """Every edit of a plan as JSON, found without the help of the module that is tested."""
    found = []
    for kind in KINDS:
        value = getattr(edits, kind)
        if isinstance(value, dict):
            found += [{"kind": kind, "value": item} for item in value.values()]
        elif value is not None:
            found += [{"kind": kind, **as_dict(edit)} for edit in (value if isinstance(value, tuple) else (value,))]
    return found


def text(change: dict[str, Any]) -> str:
    """A change for comparison. What it is called, and the reason that a kind has in common, are the explanation's."""
    dropped = {"what", "why"} if change["kind"] in WITHOUT_A_REASON else {"what"}
    return json.dumps({name: value for name, value in change.items() if name not in dropped}, sort_keys=True)


@given(request=REQUESTS, settings=SETTINGS)
def test_every_planned_edit_has_a_reason(request: Request, settings: Settings) -> None:
    try:
        edits = plan(INVENTORY, request, settings)
    except NvctError:
        return
    for edit in planned(edits):
        assert edit["kind"] in WITHOUT_A_REASON or edit["why"].strip(), edit
    assert all(each.what.strip() and each.why.strip() for each in edits.left_out)


@pytest.mark.parametrize("edit", EDIT_CLASSES, ids=lambda edit: edit.__name__)
def test_every_class_of_edits_has_a_reason_that_must_be_given(edit: type) -> None:
    assert "why" in edit._fields  # type: ignore[attr-defined]
    values = {name: "x" for name in edit._fields if name != "why"}  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="why"):
        edit(**values)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_change_is_known(kind: str) -> None:
    """A field added to Edits holds edits with a reason, is explained, and can be looked for in a container."""
    annotation = FIELD_TYPES[kind]
    if kind in WITHOUT_A_REASON:
        assert kind == "stale" or kind in CHECKS
        return
    name = annotation.removeprefix("tuple[").removesuffix(", ...]").removesuffix(" | None")
    assert getattr(model, name) in EDIT_CLASSES
    assert kind in CHECKS
    sample = getattr(model, name)(**dict.fromkeys(getattr(model, name)._fields, "x"))
    edits = replace(Edits(), **{kind: (sample,) if annotation.startswith("tuple") else sample})
    (change,) = changes_of(edits)
    assert (change.kind, change.why) == (kind, "x")


def fields_of(record: str) -> dict[str, str]:
    """The annotations in the text of the model: the record decorator keeps the names only."""
    import ast

    tree = ast.parse(Path(model.__file__).read_text())
    (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == record]
    return {
        node.target.id: ast.unparse(node.annotation)
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


FIELD_TYPES = fields_of("Edits")


def test_every_ask_of_a_request_is_told() -> None:
    asks = {name: kind for name, kind in fields_of("Request").items() if "Ask" in kind}
    values: dict[str, Any] = {}
    for name, kind in asks.items():
        ask = Ask(f"the field {name}", ("all",))
        values[name] = {"x": ask} if kind.startswith("dict") else (ask,) if kind.startswith("tuple") else ask
    explanation = explain(INVENTORY, Request(**values, privileged=True), Settings(accept_mount_lists=False))
    told = {ask.source for ask in explanation.others} | {asked.source for asked in explanation.asked}
    told.add(explanation.capabilities_source)
    assert told == {f"the field {name}" for name in asks}


@pytest.mark.parametrize(
    ("token", "devices"),
    [("0:1", ["0:1"]), ("1", ["1"]), ("0", ["0"]), ("all", ["0:0", "0:1", "1"]), ("GPU-bbbbbbbb", ["1"])],
)
def test_a_token_is_resolved(token: str, devices: list[str]) -> None:
    (asked,) = explained(token).asked
    assert (asked.token, asked.source, asked.refused) == (token, "env NVIDIA_VISIBLE_DEVICES", "")
    assert [meaning.device for meaning in asked.means] == devices


def test_a_mig_device_is_told_with_profile_and_uuid() -> None:
    (meaning,) = explained("0:1").asked[0].means
    assert meaning.uuid == LARGE.uuid
    assert meaning.what.startswith("MIG device 1 of GPU 0: 3g.20gb, ")


def test_a_refusal_names_each_token_that_is_wrong() -> None:
    explanation = explained("0:1", "foo", "7")
    assert isinstance(explanation.refusal, RequestError)
    assert [bool(asked.refused) for asked in explanation.asked] == [False, True, True]
    assert explanation.asked[1].refused == str(explanation.refusal)
    assert explanation.edits == Edits()


def test_a_node_that_can_give_nothing_is_told() -> None:
    bare = replace(INVENTORY, nodes=())
    explanation = explain(bare, request_from_env({"NVIDIA_VISIBLE_DEVICES": "1"}), Settings())
    assert isinstance(explanation.refusal, DriverError)


@pytest.mark.parametrize("value", ["", "void"])
def test_nothing_asked_for_is_nothing_left_out(value: str) -> None:
    explanation = explained(value)
    assert (explanation.asks_for, explanation.left_out, explanation.capabilities) == ("nothing", (), ())
    assert explanation.cannot == ()


def left_out(explanation: Explanation) -> dict[str, str]:
    return {each.what: each.why for each in explanation.left_out}


def test_capabilities_not_asked_for_are_told_with_what_they_would_bring() -> None:
    told = left_out(explained("1", NVIDIA_DRIVER_CAPABILITIES="utility"))
    assert "1 device node, 1 library" in told["capability compute"]
    assert "2 libraries" in told["capability graphics"]
    assert told["capability ngx"].endswith("nothing on this node")
    assert "would be refused" in told["capability display"] or "would bring" in told["capability display"]
    assert "capability utility" not in told


def test_32_bit_libraries_are_told_of_the_capabilities_that_are_there() -> None:
    assert "1 32-bit library" in left_out(explained("1"))["capability compat32"]
    told = left_out(explained("1", NVIDIA_DRIVER_CAPABILITIES="utility"))
    assert told["capability compat32"].endswith("nothing on this node")


def test_policy_switches_and_missing_files_are_told() -> None:
    settings = Settings(supported_capabilities=("compute", "utility"), cgroups=False)
    told = left_out(explained("1", settings=settings))
    assert "supported_capabilities" in told["capability graphics"]
    assert "cgroups" in told["device rules"]
    assert INVENTORY.missing[0] in told


def test_what_a_carrier_cannot_do_depends_on_the_edits() -> None:
    with_rules = explained("1").cannot
    without = explained("1", settings=Settings(cgroups=False)).cannot
    assert len(with_rules) == 2
    assert set(without) < set(with_rules)
    assert all(CARRIERS[name](Edits(), Settings()) == () for name in CARRIERS)


def test_what_cdi_specs_cannot_do() -> None:
    request = request_from_env({"NVIDIA_VISIBLE_DEVICES": "1"})
    with_hook = explain(INVENTORY, request, Settings(), "cdi-spec").cannot
    without = explain(INVENTORY, request, Settings(), "hook-free-cdi-spec").cannot
    assert with_hook == without[: len(with_hook)]
    assert "NVIDIA_REQUIRE_*" in with_hook[0]
    more = " ".join(without[len(with_hook) :])
    assert "loader cache: " in more
    assert "/proc/driver/nvidia: " in more


def test_links_and_names_are_counted_with_the_file_to_which_they_lead() -> None:
    found = groups(plan(INVENTORY, request_from_env({"NVIDIA_VISIBLE_DEVICES": "1"}), Settings()))
    compute = found["capability compute"]
    assert {link.path for link in compute.links} == {f"{LIBRARIES}/libcuda.so.1", f"{LIBRARIES}/libcuda.so"}
    assert {name.name for name in compute.loader_cache} == {"libcuda.so.1", "libcuda.so"}
    assert summary(INVENTORY, compute) == "1 library"
    assert summary(INVENTORY, found["capability utility"]) == "1 library, 1 program, 1 socket"


def test_links_in_a_circle_end() -> None:
    circle = (LinkEdit("/a/x", "y", "one"), LinkEdit("/a/y", "x", "other"))
    edits = Edits(
        mounts=(MountEdit("/s", "/a/z", ("ro",), "reason"),),
        links=circle,
        loader_cache=(CacheEdit("x", "/a/x", 64, "why"),),
    )
    assert set(groups(edits)) == {"reason", "one", "other", "why"}


Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    saved, config = tmp_path / "node.json", tmp_path / "config.yaml"
    saved.write_text(json.dumps(inventory_to_json(INVENTORY)))
    config.write_text("{}\n")
    config.chmod(0o644)
    first = ("--config", str(config), "--inventory", str(saved))
    return lambda *arguments: CliRunner().invoke(cli, (*first, *arguments), prog_name="nvct")


def test_the_command_tells_the_request_and_counts_the_files(run: Run) -> None:
    result = run("explain", "--env", "NVIDIA_VISIBLE_DEVICES=0:1")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[:2] == ["Asked for", "  0:1, in env NVIDIA_VISIBLE_DEVICES"]
    assert LARGE.uuid in lines[2]
    assert "  capabilities compute, utility, by default" in lines
    assert any(line.startswith("  capability compute: 1 library, found by 2 links and 2 names") for line in lines)
    assert "\x1b" not in result.stdout
    assert "libcuda.so.1" not in result.stdout


def test_files_are_listed_on_demand(run: Run) -> None:
    lines = run("explain", "--env", "NVIDIA_VISIBLE_DEVICES=1", "--files").stdout.splitlines()
    assert f"    {LIBRARIES}/libcuda.so.{VERSION} from /node{LIBRARIES}/libcuda.so.{VERSION}" in lines
    assert f"    {LIBRARIES}/libcuda.so.1 -> libcuda.so.{VERSION}" in lines
    assert f"    loader cache: libcuda.so.1 is {LIBRARIES}/libcuda.so.1" in lines


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_a_refused_request_is_explained_and_ends_as_plan_does(run: Run, as_json: tuple[str, ...]) -> None:
    env = ("--env", "NVIDIA_VISIBLE_DEVICES=0:1,foo")
    result, refused = run("explain", *env, *as_json), run("plan", *env)
    assert (result.exit_code, result.stderr) == (1, refused.stderr)
    assert refused.exit_code == 1
    if as_json:
        told = json.loads(result.stdout)
        assert refused.stderr == f"nvct: {told['refusal']}\n"
        assert [bool(asked["refused"]) for asked in told["asked"]] == [False, True]
    else:
        assert "    refused" in result.stdout.splitlines()


def test_json_has_every_part(run: Run) -> None:
    told = json.loads(run("explain", "--env", "NVIDIA_VISIBLE_DEVICES=1", "--json").stdout)
    assert told["asks_for"] == "devices"
    assert told["asked"][0]["means"][0]["uuid"] == INVENTORY.gpus[1].uuid
    assert {change["kind"] for change in told["changes"]} >= {"devices", "mounts", "links", "loader_cache", "proc"}
    assert "comparison" not in told


def test_nothing_is_asked_for(run: Run) -> None:
    assert run("explain").stdout == "No GPU is asked for, so nothing changes in the container.\n"


def test_what_the_settings_set_aside_is_told(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("unprivileged_env: ignore\n")
    lines = run("explain", "--env", "NVIDIA_VISIBLE_DEVICES=1").stdout.splitlines()
    assert lines[0] == "Nothing of the request counts here, so nothing changes in the container."
    assert any("unprivileged_env" in line for line in lines[1:])


def test_a_running_container_has_a_layout_of_its_own(run: Run) -> None:
    result = run("explain", "--container", "1", "--layout", "lib64")
    assert result.exit_code == 2
    assert "leave out --layout" in result.stderr


def test_a_process_of_the_host_is_in_no_container(run: Run) -> None:
    result = run("explain", "--container", str(os.getpid()), "--env", "NVIDIA_VISIBLE_DEVICES=1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"nvct: --container {os.getpid()}: that process is in no container, it sees the files that nvct sees\n"
    )


def test_a_process_that_may_not_be_looked_at_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(pid: int) -> dict[str, str]:
        raise PermissionError(13, "Permission denied", f"/proc/{pid}/environ")

    monkeypatch.setattr(running, "variables_of", forbidden)
    result = run("explain", "--container", "1")
    assert result.exit_code == 3
    assert (
        result.stderr
        == "nvct: /proc/1/environ: Permission denied; it takes root with CAP_SYS_PTRACE to look into a container\n"
    )


def test_what_the_runtime_cannot_do() -> None:
    request = request_from_env({"NVIDIA_VISIBLE_DEVICES": "1"})
    with_hook = explain(INVENTORY, request, Settings(), "runtime").cannot
    without = explain(INVENTORY, request, Settings(), "hook-free-runtime").cannot
    assert with_hook == without[: len(with_hook)]
    assert "volumes that are mounted later" in with_hook[0]
    assert any(sentence.startswith("loader cache: ") for sentence in without[len(with_hook) :])
    in_hook_mode = explain(INVENTORY, request, Settings(runtime_mode="hook"), "runtime").cannot
    assert in_hook_mode == explain(INVENTORY, request, Settings(), "hook").cannot
    by_specs = explain(INVENTORY, request, Settings(runtime_mode="cdi"), "runtime").cannot
    assert "CDI specs of this machine" in by_specs[-1]


@pytest.mark.parametrize(
    ("value", "capabilities"), [("example.com/nic=a,1", ("compute", "utility")), ("a.com/b=c", ())]
)
def test_names_of_other_makers_are_for_their_specs_to_say(value: str, capabilities: tuple[str, ...]) -> None:
    request = request_from_env({"NVIDIA_VISIBLE_DEVICES": value})
    explanation = explain(INVENTORY, request, Settings(), "runtime")
    name = value.partition(",")[0]
    assert (explanation.refusal, explanation.capabilities) == (None, capabilities)
    assert (explanation.asked[0].token, explanation.asked[0].refused) == (name, "")
    assert explanation.cannot[-1].startswith(f"what {name} brings stands in the CDI spec")
    assert bool(explanation.edits.devices) == bool(capabilities)
    assert explain(INVENTORY, request, Settings(), "hook").refusal is not None
