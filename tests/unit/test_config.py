"""`nvct config`: every key of the established toolkit's file, and what is said about the settings of this node."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from nvct import settings
from nvct.cli.main import cli
from nvct.errors import ConfigError
from nvct.established import Translation, to_yaml, translate
from nvct.settings import CAPABILITIES, Settings

# The file as the established toolkit installs it, in our own arrangement of the same keys and values.
INSTALLED = """
disable-require = false
supported-driver-capabilities = "compat32,compute,display,graphics,ngx,utility,video"
#swarm-resource = "DOCKER_RESOURCE_GPU"
[nvidia-container-cli]
environment = []
ldconfig = "@/sbin/ldconfig"
load-kmods = true
#no-cgroups = false
[nvidia-container-runtime]
log-level = "info"
mode = "auto"
runtimes = ["runc", "crun"]
[nvidia-container-runtime.modes]
[nvidia-container-runtime.modes.cdi]
annotation-prefixes = ["cdi.k8s.io/"]
default-kind = "nvidia.com/gpu"
spec-dirs = ["/etc/cdi", "/var/run/cdi"]
[nvidia-container-runtime.modes.csv]
mount-spec-path = "/etc/nvidia-container-runtime/host-files-for-container.d"
[nvidia-container-runtime.modes.legacy]
cuda-compat-mode = "ldconfig"
[nvidia-container-runtime-hook]
path = "nvidia-container-runtime-hook"
skip-mode-detection = false
[nvidia-ctk]
path = "nvidia-ctk"
"""

RUNTIME = "nvidia-container-runtime"
CLI = "nvidia-container-cli"


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, prog_name="nvct")


def toml(folder: Path, text: str) -> str:
    path = folder / "config.toml"
    path.write_text(text)
    return str(path)


def one_key(folder: Path, key: str, value: str) -> Translation:
    *tables, name = key.split(".")
    head = f"[{'.'.join(tables)}]\n" if tables else ""
    return translate(toml(folder, f"{head}{name} = {value}\n"))


def test_the_installed_file_means_the_defaults(tmp_path: Path) -> None:
    translation = translate(toml(tmp_path, INSTALLED))
    assert settings.from_mapping(dict(translation.values), "") == Settings()
    assert not [drop for drop in translation.dropped if drop.unknown]
    # Every key that stands there is either taken over or told.
    told = {drop.key for drop in translation.dropped} | {key for keys in translation.origins.values() for key in keys}
    assert len(told) == INSTALLED.count(" = ") - INSTALLED.count("\n#")


ALL = list(CAPABILITIES)
PREFIX = "nvidia.cdi.k8s.io/"
SWARM = ["DOCKER_RESOURCE_GPU", "DOCKER_RESOURCE_A"]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("disable-require", "true", {"disable_require": True}),
        ("swarm-resource", f'"{SWARM[0]}, {SWARM[1]},"', {"swarm_resource": SWARM}),
        ("swarm-resource", '""', {"swarm_resource": []}),
        ("accept-nvidia-visible-devices-envvar-when-unprivileged", "true", {"unprivileged_env": "accept"}),
        ("accept-nvidia-visible-devices-envvar-when-unprivileged", "false", {"unprivileged_env": "ignore"}),
        ("accept-nvidia-visible-devices-as-volume-mounts", "true", {"accept_mount_lists": True}),
        ("supported-driver-capabilities", '"all"', {"supported_capabilities": ALL}),
        ("supported-driver-capabilities", '"utility, compute"', {"supported_capabilities": ["compute", "utility"]}),
        (f"{CLI}.root", '"/run/nvidia/driver"', {"root": "/run/nvidia/driver"}),
        (f"{CLI}.root", '""', {"root": "/"}),
        (f"{CLI}.load-kmods", "true", {"load_kernel_modules": True, "device_nodes": "create"}),
        (f"{CLI}.load-kmods", "false", {"load_kernel_modules": False, "device_nodes": "print"}),
        (f"{CLI}.no-cgroups", "true", {"cgroups": False}),
        (f"{RUNTIME}.modes.legacy.cuda-compat-mode", '"ldconfig"', {"cuda_compat": "cache"}),
        (f"{RUNTIME}.modes.legacy.cuda-compat-mode", '"mount"', {"cuda_compat": "cache"}),
        (f"{RUNTIME}.modes.legacy.cuda-compat-mode", '"hook"', {"cuda_compat": "cache"}),
        (f"{RUNTIME}.modes.legacy.cuda-compat-mode", '"disabled"', {"cuda_compat": "disabled"}),
        (f"{RUNTIME}.runtimes", '["crun"]', {"runtimes": ["crun"]}),
        (f"{RUNTIME}.mode", '"auto"', {"runtime_mode": "auto"}),
        (f"{RUNTIME}.mode", '"legacy"', {"runtime_mode": "hook"}),
        (f"{RUNTIME}.mode", '"cdi"', {"runtime_mode": "cdi"}),
        (f"{RUNTIME}.mode", '"jit-cdi"', {"runtime_mode": "spec"}),
        (f"{RUNTIME}.modes.cdi.spec-dirs", '["/etc/cdi"]', {"cdi_spec_dirs": ["/etc/cdi"]}),
        (f"{RUNTIME}.modes.cdi.default-kind", '"a/b"', {"cdi_default_kind": "a/b"}),
        (f"{RUNTIME}.modes.cdi.annotation-prefixes", f'["{PREFIX}"]', {"cdi_annotation_prefixes": [PREFIX]}),
        ("features.disable-cuda-compat-lib-hook", "true", {"cuda_compat": "disabled"}),
        ("features.ignore-imex-channel-requests", "true", {"imex_channels": False}),
    ],
)  # fmt: skip
def test_what_still_means_something_is_translated(
    tmp_path: Path, key: str, value: str, expected: dict[str, Any]
) -> None:
    translation = one_key(tmp_path, key, value)
    assert (translation.values, translation.dropped) == (expected, ())
    assert translation.origins == dict.fromkeys(expected, (key,))


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        (f"{CLI}.path", '"/usr/bin/nvidia-container-cli"', "calls no such program"),
        (f"{CLI}.environment", '["A=b"]', "calls no such program"),
        (f"{CLI}.debug", '"/var/log/x"', "no log file"),
        (f"{CLI}.ldcache", '"/etc/ld.so.cache"', "without being told"),
        (f"{CLI}.ldcache", '"/opt/ld.so.cache"', "library_search_path"),
        (f"{CLI}.no-pivot", "true", "changes no root"),
        (f"{CLI}.user", '"root:video"', "child process"),
        (f"{CLI}.ldconfig", '"/sbin/ldconfig"', "runs no ldconfig"),
        (f"{RUNTIME}.debug", '"/dev/null"', "no log file"),
        (f"{RUNTIME}.log-level", '"debug"', "no log file"),
        (f"{RUNTIME}.mode", '"csv"', "Jetson"),
        (f"{RUNTIME}.modes.csv.mount-spec-path", '"/x"', "Jetson"),
        (f"{RUNTIME}.modes.csv.compat-container-root", '"/x"', "Jetson"),
        (f"{RUNTIME}.modes.cdi.annotation-prefixes", '["example.com/"]', "end in cdi.k8s.io/, unlike 'example.com/'"),
        (f"{RUNTIME}.modes.jit-cdi.nvcdi-feature-flags", "[]", "plans for each container"),
        (f"{RUNTIME}.modes.jit-cdi.nvcdi-disable-hooks", "[]", "runtime_hook"),
        (f"{RUNTIME}-hook.path", '"x"', "calls no such program"),
        (f"{RUNTIME}-hook.skip-mode-detection", "true", "no modes"),
        ("nvidia-ctk.path", '"x"', "calls no such program"),
        ("swarm-resource", '"GPUS"', "DOCKER_RESOURCE_<NAME>"),
        ("features.allow-cuda-compat-libs-from-container", "true", "never mounts what an image brings"),
        ("features.allow-ldconfig-from-container", "true", "runs no ldconfig"),
        ("features.allow-unknown-oci-spec-fields", "true", "leaves the rest alone"),
        ("features.disable-cuda-compat-lib-hook", "false", "without it"),
        ("features.disable-imex-channel-creation", "true", "makes no IMEX channels"),
        ("features.no-additional-gids-for-device-nodes", "true", "no groups"),
    ],
)
def test_what_means_nothing_is_told_with_a_reason(tmp_path: Path, key: str, value: str, why: str) -> None:
    translation = one_key(tmp_path, key, value)
    assert translation.values == {}
    (drop,) = translation.dropped
    assert (drop.key, drop.unknown) == (key, False)
    assert why in drop.why


@pytest.mark.parametrize(
    ("key", "value", "kept", "strange"),
    [
        (
            f"{RUNTIME}.modes.cdi.annotation-prefixes",
            '["cdi.k8s.io/", "nvidia.cdi.k8s.io/", "x/"]',
            {"cdi_annotation_prefixes": ["cdi.k8s.io/", "nvidia.cdi.k8s.io/"]},
            "'x/'",
        ),
        ("swarm-resource", f'"{SWARM[0]},GPUS"', {"swarm_resource": [SWARM[0]]}, "'GPUS'"),
    ],
)
def test_of_a_list_only_what_means_nothing_is_dropped(
    tmp_path: Path, key: str, value: str, kept: dict[str, Any], strange: str
) -> None:
    translation = one_key(tmp_path, key, value)
    assert translation.values == kept
    (drop,) = translation.dropped
    assert drop.why.endswith(f", unlike {strange}")


def test_an_unknown_key_is_named_with_what_it_is_like(tmp_path: Path) -> None:
    (drop,) = one_key(tmp_path, f"{CLI}.no-cgroup", "true").dropped
    assert drop.unknown
    assert f"did it mean {CLI}.no-cgroups?" in drop.why
    (drop,) = one_key(tmp_path, "zzz", "1").dropped
    assert drop.unknown
    assert "did it mean" not in drop.why


@pytest.mark.parametrize("first", ["legacy", "features"])
def test_of_two_words_about_cuda_compat_the_stricter_holds(tmp_path: Path, first: str) -> None:
    tables = {
        "legacy": f'[{RUNTIME}.modes.legacy]\ncuda-compat-mode = "ldconfig"\n',
        "features": "[features]\ndisable-cuda-compat-lib-hook = true\n",
    }
    text = tables.pop(first) + "".join(tables.values())
    translation = translate(toml(tmp_path, text))
    assert translation.values == {"cuda_compat": "disabled"}
    assert len(translation.origins["cuda_compat"]) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("disable-require = 1\n", "`disable-require` is 1, expected true or false"),
        ("swarm-resource = []\n", "`swarm-resource` is [], expected a text"),
        ('supported-driver-capabilities = "cuda"\n', "expected names of compute, utility"),
        (f"[{RUNTIME}]\nmode = 'fast'\n", "expected one of auto, legacy"),
        (f"[{RUNTIME}.modes.legacy]\ncuda-compat-mode = 'x'\n", "expected one of ldconfig"),
        (
            f"[{RUNTIME}]\nruntimes = 'runc'\n",
            "`nvidia-container-runtime.runtimes` is 'runc', expected a list of texts",
        ),
        (f"[{RUNTIME}]\nruntimes = ['./runc']\n", "`runtimes` has './runc', expected a list of names, such as runc"),
        (f"[{CLI}]\nroot = 'run/driver'\n", "`root` is 'run/driver', expected an absolute path"),
        (f"[{CLI}\n", "is not TOML"),
    ],
)
def test_a_value_that_means_nothing_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = toml(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        translate(path)
    assert said in str(refused.value)
    assert path in str(refused.value)


def test_a_file_that_is_no_text_or_is_absent_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not TOML"):
        translate(str(tmp_path / "config.toml"))
    with pytest.raises(ConfigError, match="No such file.*--from"):
        translate(str(tmp_path / "absent"))


def test_import_writes_a_file_that_nvct_reads(tmp_path: Path) -> None:
    source, target = (
        toml(tmp_path, INSTALLED.replace("load-kmods = true", "load-kmods = false")),
        tmp_path / "new/c.yaml",
    )
    before = os.umask(0o077)
    try:
        done = call("--config", str(target), "config", "import", "--from", source)
    finally:
        os.umask(before)
    assert done.exit_code == 0, done.output
    assert settings.load(str(target)) == Settings(load_kernel_modules=False, device_nodes="print")
    assert target.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in target.parent.iterdir()] == ["c.yaml"]
    assert done.output.startswith(f"{target} written, 10 settings from {source}\n")
    assert "Not taken over" in done.output
    assert f"# {CLI}.load-kmods\nload_kernel_modules: false\n" in target.read_text()


def test_import_overwrites_nothing(tmp_path: Path) -> None:
    source, target = toml(tmp_path, INSTALLED), tmp_path / "mine.yaml"
    target.write_text("root: /mine\n")
    done = call("config", "import", "--from", source, "--output", str(target))
    assert done.exit_code == 4
    assert f"{target} exists, and is not overwritten" in done.output
    assert target.read_text() == "root: /mine\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml", "mine.yaml"]


def test_a_dry_run_prints_the_file_and_writes_nothing(tmp_path: Path) -> None:
    source = toml(tmp_path, f"{INSTALLED}[features]\nunheard-of = true\n")
    done = call("--config", str(tmp_path / "c.yaml"), "config", "import", "--dry-run", "--from", source)
    assert done.exit_code == 0, done.output
    (tmp_path / "printed.yaml").write_text(done.stdout)
    assert settings.load(str(tmp_path / "printed.yaml")) == Settings()
    assert "Unknown: features.unheard-of: " in done.stderr
    assert f"Not taken over: {CLI}.ldconfig: " in done.stderr
    assert not (tmp_path / "c.yaml").exists()


def test_a_file_without_settings_becomes_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(to_yaml(translate(toml(tmp_path, "")), "config.toml"))
    assert settings.load(str(tmp_path / "c.yaml")) == Settings()


def test_import_without_the_established_toolkit_says_so(tmp_path: Path) -> None:
    done = call("config", "import", "--from", str(tmp_path / "absent.toml"), "--dry-run")
    assert done.exit_code == 4
    assert "absent.toml: No such file" in done.output


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text("root: /run/nvidia/driver\ncgroups: false\n")
    path.chmod(0o644)
    return str(path)


def test_show_says_where_each_value_comes_from(config_file: str) -> None:
    done = call("--config", config_file, "config", "show", "--json")
    assert done.exit_code == 0, done.output
    shown = json.loads(done.output)
    assert shown["file"] == config_file
    rows = shown["settings"]
    assert list(rows) == list(settings.to_json(Settings()))
    assert rows["root"] == {"value": "/run/nvidia/driver", "source": config_file, "default": "/"}
    assert rows["dev_root"] == {"value": "/run/nvidia/driver", "source": "root, which it follows", "default": "/"}
    assert rows["cgroups"] == {"value": False, "source": config_file, "default": True}
    assert rows["proc_root"] == {"value": "/proc", "source": "default", "default": "/proc"}


def test_show_is_a_table_for_people(config_file: str) -> None:
    done = call("--config", config_file, "config", "show")
    lines = [" ".join(row.split()) for row in done.output.splitlines()]
    assert lines[0] == "Setting Value From Default"
    assert f"cgroups false {config_file} true" in lines
    assert "device_table - default -" in lines
    assert "device_nodes create default create" in lines


def test_show_without_a_file_shows_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "DEFAULT_PATH", str(tmp_path / "absent.yaml"))
    done = call("--config", str(tmp_path / "absent.yaml"), "config", "show", "--json")
    assert {row["source"] for row in json.loads(done.output)["settings"].values()} == {"default"}


def test_show_refuses_a_wrong_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("cgroup: false\n")
    done = call("--config", str(path), "config", "show")
    assert done.exit_code == 4
    assert "did you mean `cgroups`" in done.output


VALUES = st.one_of(st.booleans(), st.integers(), st.text(max_size=12), st.lists(st.text(max_size=5), max_size=2))
KEYS = st.sampled_from(["disable-require", "swarm-resource", "supported-driver-capabilities", "root", "mode", "x"])
TABLES = st.dictionaries(KEYS, VALUES, max_size=4)


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80, deadline=None)
@given(top=TABLES, cli_table=TABLES, runtime_table=TABLES)
def test_any_file_is_translated_or_refused_in_one_line(
    tmp_path: Path, top: dict[str, Any], cli_table: dict[str, Any], runtime_table: dict[str, Any]
) -> None:
    tables = [("", top), (f"[{CLI}]\n", cli_table), (f"[{RUNTIME}]\n", runtime_table)]
    text = "".join(
        head + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items()) for head, table in tables
    )
    path = toml(tmp_path, text)
    try:
        translation = translate(path)
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    (tmp_path / "c.yaml").write_text(to_yaml(translation, path))
    settings.load(str(tmp_path / "c.yaml"))
