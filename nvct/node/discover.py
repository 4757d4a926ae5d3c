"""Read the host, and say everything that this node has for GPU containers: Settings → Inventory."""

from __future__ import annotations

import os

from nvct.errors import DriverError
from nvct.model import BINARY, LIBRARY, DriverFile, Gpu, Inventory, MigDevice, Roots
from nvct.node import catalog, configs, extras, files, nvml, procfs, verdicts, wsl
from nvct.node.catalog import Architecture
from nvct.node.devices import NodeReader, control_nodes, missing_node, node_names, node_reader
from nvct.node.files import LibrarySearch
from nvct.node.mig import profile_name
from nvct.node.nvml import GpuAnswer, MigAnswer, Subject, brand_name
from nvct.node.roots import on_host
from nvct.record import replace
from nvct.settings import Settings


def discover(settings: Settings) -> Inventory:
    """Everything that this node has. A driver without a GPU is an inventory without GPUs.

    NVML is asked in a child process for at most `settings.nvml_timeout_s` seconds. Raises DriverError when there is no
    driver, when its libraries are absent, elsewhere or of another version than the kernel module, and when NVML fails.
    What is merely incomplete stands in the inventory's `missing`.
    """
    name = os.uname().machine
    architecture = _architecture(name)
    if wsl.is_wsl(settings):
        return wsl.discover_wsl(settings, name, architecture)
    version = _module_version(settings, architecture)
    libraries = files.find_libraries(settings.root, architecture, version, settings.library_search_path)
    read_node = node_reader(settings.dev_root, settings.device_table)
    subject = Subject(
        library=_nvml_library(settings, architecture, version, libraries),
        version=version,
        version_path=procfs.version_path(settings.proc_root),
        dev_root=settings.dev_root,
    )
    answer = nvml.ask(subject, settings.nvml_timeout_s, read_node)
    if answer.driver_version != version:
        raise verdicts.version_mismatch(version, subject.version_path, {answer.driver_version: subject.library})
    majors = procfs.read_majors(settings.proc_root)
    nodes, no_control = control_nodes(read_node, majors, settings.dev_root)
    gpus, no_capability = _gpus(settings, answer.gpus, read_node)
    driver_files = (
        *libraries.files,
        *files.find_programs(settings.root),
        *files.find_firmware(settings.root, version, files.firmware_setting(settings.sys_root)),
        *files.find_sockets(settings.root),
        *configs.find_configs(settings.root, name),
        *configs.find_xorg_modules(settings.root, version, libraries.files),
    )
    return Inventory(
        driver_version=version,
        cuda_version=nvml.cuda_version(answer),
        architecture=name,
        roots=Roots(settings.root, settings.dev_root, settings.proc_root),
        majors=majors,
        gpus=gpus,
        nodes=nodes,
        files=driver_files,
        missing=(
            *nvml.broken_gpus(answer),
            *no_capability,
            *no_control,
            *_missing_gpu_nodes(settings, read_node, majors, gpus),
            *_missing_files(version, driver_files),
            *libraries.notes,
        ),
        extra_nodes=extras.extra_nodes(read_node, node_names(settings.dev_root, settings.device_table)),
        mig_minors=extras.mig_minors(settings.proc_root),
    )


def _architecture(name: str) -> Architecture:
    if name not in catalog.ARCHITECTURES:
        raise DriverError(
            f"this machine is {name}, for which no NVIDIA driver is known; "
            f"expected one of {', '.join(catalog.ARCHITECTURES)}"
        )
    return catalog.ARCHITECTURES[name]


def _module_version(settings: Settings, architecture: Architecture) -> str:
    try:
        return procfs.read_driver_version(settings.proc_root)
    except FileNotFoundError:
        raise verdicts.no_module(settings, architecture) from None


def _nvml_library(settings: Settings, architecture: Architecture, version: str, search: LibrarySearch) -> str:
    for file in search.files:
        if file.kind == LIBRARY and catalog.stem_of(os.path.basename(file.path)) == catalog.NVML_STEM:
            return on_host(settings.root, file.path)
    raise verdicts.no_nvml(settings, architecture, version, search)


def _gpus(
    settings: Settings, answers: tuple[GpuAnswer, ...], read_node: NodeReader
) -> tuple[tuple[Gpu, ...], list[str]]:
    missing: list[str] = []
    gpus = []
    for answer in answers:
        gpu = _gpu(settings, answer, missing)
        drm_nodes, lacks = extras.drm_nodes(settings.sys_root, gpu.proc_name, read_node, settings.dev_root)
        missing += lacks
        gpus.append(replace(gpu, drm_nodes=drm_nodes))
    return tuple(gpus), missing


def _gpu(settings: Settings, answer: GpuAnswer, missing: list[str]) -> Gpu:
    mig_devices = (_mig_device(settings, answer, device, missing) for device in answer["mig_devices"])
    return Gpu(
        index=answer["index"],
        uuid=answer["uuid"],
        minor=answer["minor"],
        bus_id=answer["bus_id"],
        model=answer["model"],
        brand=brand_name(answer["brand"]),
        compute_capability=".".join(map(str, answer["compute_capability"])),
        memory_mib=answer["memory_bytes"] >> 20,
        mig_enabled=answer["mig_enabled"],
        mig_devices=tuple(device for device in mig_devices if device is not None),
    )


def _mig_device(settings: Settings, gpu: GpuAnswer, device: MigAnswer, missing: list[str]) -> MigDevice | None:
    """The MIG device with its capability minors; None, and a sentence, when the kernel has no capability for it."""
    gi, ci = device["gi"], device["ci"]
    try:
        gi_minor = procfs.read_capability_minor(settings.proc_root, procfs.gi_access(gpu["minor"], gi))
        ci_minor = procfs.read_capability_minor(settings.proc_root, procfs.ci_access(gpu["minor"], gi, ci))
    except OSError as error:
        missing.append(
            f"MIG device {gpu['index']}:{device['index']} ({device['uuid']}) is left out: "
            f"{error.filename}: {error.strerror}; expected the capability file that the kernel module makes for it"
        )
        return None
    return MigDevice(
        index=device["index"],
        uuid=device["uuid"],
        profile=profile_name(device, gpu["memory_bytes"]),
        gi=gi,
        ci=ci,
        memory_mib=device["memory_mib"],
        gi_minor=gi_minor,
        ci_minor=ci_minor,
    )


def _missing_gpu_nodes(
    settings: Settings, read_node: NodeReader, majors: dict[str, int], gpus: tuple[Gpu, ...]
) -> list[str]:
    """Sentences about the nodes of GPUs and of MIG capabilities; a container that asks for such a device must fail."""
    wanted: list[tuple[str, int, int, str]] = []
    for gpu in gpus:
        wanted.append((f"/dev/nvidia{gpu.minor}", majors.get("nvidia", 0), gpu.minor, f"GPU {gpu.index}"))
        if (
            "nvidia-caps" not in majors
        ):  # before driver 450.80 the capability files alone decide, and nodes do not exist
            continue
        for device in gpu.mig_devices:
            for minor in (device.gi_minor, device.ci_minor):
                path = f"/dev/nvidia-caps/nvidia-cap{minor}"
                wanted.append((path, majors["nvidia-caps"], minor, f"MIG device {gpu.index}:{device.index}"))
    sentences = []
    for path, major, minor, user in wanted:
        lack = missing_node(read_node, path, major, minor, settings.dev_root)
        if lack:
            sentences.append(f"{user} cannot be used: {lack}")
    return sentences


def _missing_files(version: str, found: tuple[DriverFile, ...]) -> list[str]:
    """A sentence for each capability that lacks files which every complete driver has."""
    present = {catalog.stem_of(os.path.basename(file.path)) for file in found if file.kind == LIBRARY}
    present |= {os.path.basename(file.path) for file in found if file.kind == BINARY}
    lacking: dict[str, list[str]] = {}
    for library in catalog.LIBRARIES:
        if library.expected and library.stem not in present:
            lacking.setdefault(library.capability, []).append(f"{library.stem}.{version}")
    for program in catalog.PROGRAMS:
        if program.expected and program.name not in present:
            lacking.setdefault(program.capability, []).append(program.name)
    return [f"capability {capability} is incomplete: no {', '.join(names)}" for capability, names in lacking.items()]
