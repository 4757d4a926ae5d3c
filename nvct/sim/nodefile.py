"""A node stated in YAML: anything that a profile has not.

::

    profile: dgx-a100            # what is not stated below comes from here; needed unless driver and gpus are stated
    driver: 550.163.01           # the kernel module
    cuda: "12.4"
    libraries: 550.54.14         # the driver's files, where they are of another version than the module
    open_module: false
    gpus:                        # by NVML index
    - card: a100-40              # a card of the profiles; what follows overrides it
      uuid: GPU-00112233-4455-6677-8899-aabbccddeeff
      minor: 3
      bus_id: "0000:07:00.0"
      model: NVIDIA A100-SXM4-40GB
      brand: NVIDIA              # TESLA, QUADRO, GEFORCE, TITAN, NVIDIA_RTX, UNKNOWN
      compute_capability: "8.0"
      memory_mib: 40536
      mig: [1g.5gb, 3g.20gb@4, 1c.2g.10gb]
    fabric_manager: true
    nvswitches: 6
    imex_channels: 0
    gds: 2                       # GPUDirect Storage: nodes nvidia-fs<N>
    rdma: 2                      # InfiniBand: nodes uverbs<N>, and rdma_cm
    gdrcopy: true
    nvml: {init: driver_not_loaded, delay_s: 2.0}
    majors: {nvidia-uvm: 500}
    missing: ["usr/lib/*/libnvidia-encode*"]      # the loader cache still lists them
    unreadable: ["usr/bin/nvidia-smi"]            # mode 0: root reads on
    links: {"usr/lib64/libcuda.so.1": "/nowhere"}
"""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path
from typing import NoReturn

import yaml

from nvct.errors import ConfigError
from nvct.record import replace
from nvct.sim.profiles import CARDS, CUDA_VERSION, DRIVER_VERSION, PROFILES, cuda_of, gpu_uuid, spec_from_profile
from nvct.sim.spec import INIT_ANSWERS, Card, GpuSpec, NodeSpec, NvmlBehaviour
from nvct.sim.state import BRANDS

_BUS_ID = re.compile(r"([0-9a-fA-F]{1,8}):([0-9a-fA-F]{2}):([01][0-9a-fA-F])\.0")


def spec_from_yaml(path: str | os.PathLike[str]) -> NodeSpec:
    """The node of a file. Raises ConfigError with the file, the key, what stands there and what was expected."""
    try:
        document = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read as a node file: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:  # ValueError: no UTF-8, or a date or number that cannot be
        raise ConfigError(f"{path} cannot be read as a node file: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise ConfigError(f"{path} cannot be read as a node file: its lists and mappings are too deep") from None
    top = _Mapping(document, f"{path}")
    base = _base(top)
    gpus = top.list("gpus")
    nvml = top.mapping("nvml")
    spec = replace(
        base,
        name=Path(path).stem,
        libraries=top.version("libraries", "", DRIVER_VERSION),
        open_module=top.flag("open_module", base.open_module),
        gpus=base.gpus if gpus is None else _gpus(gpus, top.where, Path(path).stem),
        fabric_manager=top.flag("fabric_manager", base.fabric_manager),
        nvswitches=top.number("nvswitches", base.nvswitches, 64),
        imex_channels=top.number("imex_channels", base.imex_channels, 2048),
        gds=top.number("gds", base.gds, 16),
        rdma=top.number("rdma", base.rdma, 16),
        gdrcopy=top.flag("gdrcopy", base.gdrcopy),
        nvml=NvmlBehaviour(nvml.choice("init", "ok", tuple(INIT_ANSWERS)), nvml.seconds("delay_s")),
        majors=_majors(top.mapping("majors")),
        missing=_paths(top, "missing"),
        unreadable=_paths(top, "unreadable"),
        links=_links(top.mapping("links")),
    )
    nvml.done()
    top.done()
    return spec


def _base(top: _Mapping) -> NodeSpec:
    driver, cuda = top.version("driver", "", DRIVER_VERSION), top.version("cuda", "", CUDA_VERSION)
    profile = top.choice("profile", "", tuple(PROFILES))
    if profile:
        return spec_from_profile(profile, driver=driver or None, cuda=cuda or None)
    if not driver or "gpus" not in top.values:
        raise ConfigError(f"{top.where} states no `profile`, so it must state `driver` and `gpus`")
    return NodeSpec(name="", driver=driver, cuda=cuda or cuda_of(driver), gpus=())


def _gpus(rows: list[object], where: str, node: str) -> tuple[GpuSpec, ...]:
    gpus = tuple(_gpu(_Mapping(row, f"{where}: gpus[{index}]"), index, node) for index, row in enumerate(rows))
    for key in ("uuid", "minor", "bus_id"):
        values = [getattr(gpu, key) for gpu in gpus]
        twice = [value for value in values if values.count(value) > 1]
        if twice:
            raise ConfigError(f"{where}: gpus: two GPUs have the {key} {twice[0]!r}; each needs its own")
    return gpus


def _gpu(row: _Mapping, index: int, node: str) -> GpuSpec:
    names = row.list("mig")
    gpu = GpuSpec(
        card=_card(row),
        uuid=_uuid(row, gpu_uuid(node, index)),
        minor=row.number("minor", index, 254 - 1),
        bus_id=_bus_id(row, f"0000:{index + 1:02x}:00.0"),
        mig=None if names is None else tuple(str(name) for name in names),
    )
    row.done()
    return gpu


def _card(row: _Mapping) -> Card:
    name = row.choice("card", "", tuple(CARDS))
    if not name:
        raise ConfigError(f"{row.where} states no `card`; valid: {', '.join(CARDS)}")
    card = CARDS[name]
    return replace(
        card,
        model=row.text("model", card.model),
        brand=row.choice("brand", card.brand, tuple(BRANDS)),
        compute_capability=row.version("compute_capability", card.compute_capability, CUDA_VERSION),
        memory_mib=row.number("memory_mib", card.memory_mib, 1 << 30),
    )


def _uuid(row: _Mapping, default: str) -> str:
    value = row.text("uuid", default)
    try:
        valid = str(uuid.UUID(value.removeprefix("GPU-")))
    except ValueError:
        valid = ""
    if value != f"GPU-{valid}":
        raise ConfigError(f"{row.where}: uuid is {value!r}; expected GPU- and a UUID in small letters")
    return value


def _bus_id(row: _Mapping, default: str) -> str:
    value = row.text("bus_id", default)
    match = _BUS_ID.fullmatch(value)
    if match is None:
        raise ConfigError(f"{row.where}: bus_id is {value!r}; expected a form as 0000:07:00.0, in quotes")
    return f"{int(match[1], 16):08X}:{match[2]}:{match[3]}.0".upper()


def _majors(mapping: _Mapping) -> dict[str, int]:
    wrong = [name for name in mapping.values if not str(name).startswith("nvidia")]
    if wrong:
        raise ConfigError(f"{mapping.where}: {wrong[0]!r} is no major of the driver; they begin with nvidia")
    return {str(name): mapping.number(str(name), 0, 511) for name in tuple(mapping.values)}


def _paths(top: _Mapping, key: str) -> tuple[str, ...]:
    return tuple(_inside(f"{top.where}: {key}", str(path)) for path in top.list(key) or [])


def _links(mapping: _Mapping) -> dict[str, str]:
    return {_inside(mapping.where, str(path)): mapping.text(str(path), "") for path in tuple(mapping.values)}


def _inside(where: str, path: str) -> str:
    if path.startswith("/") or ".." in path.split("/") or not path:
        raise ConfigError(f"{where}: {path!r} must be relative to the node's folder, without ..")
    return path


class _Mapping:
    """A YAML mapping that is read key by key; `done` refuses the keys that nobody read."""

    def __init__(self, values: object, where: str) -> None:
        if not isinstance(values, dict):
            raise ConfigError(f"{where} holds {_kind(values)}; expected keys and values")
        self.values: dict[object, object] = values
        self.where = where
        self._read: set[str] = set()

    def done(self) -> None:
        unknown = [str(key) for key in self.values if key not in self._read]
        if unknown:
            raise ConfigError(f"{self.where}: unknown key {unknown[0]!r}; valid: {', '.join(sorted(self._read))}")

    def mapping(self, key: str) -> _Mapping:
        value = self._take(key)
        return _Mapping({} if value is None else value, f"{self.where}: {key}")

    def list(self, key: str) -> list[object] | None:
        value = self._take(key)
        return value if value is None or isinstance(value, list) else self._wrong(key, "a list")

    def text(self, key: str, default: str) -> str:
        value = self._take(key)
        if value is None:
            return default
        return value if isinstance(value, str) and value and value.isprintable() else self._wrong(key, "a line of text")

    def version(self, key: str, default: str, form: re.Pattern[str]) -> str:
        value = self._take(key)
        if value is None:
            return default
        text = str(value)  # YAML reads 12.4 as a number, which keeps its digits
        return text if form.fullmatch(text) else self._wrong(key, "a version as 550.163.01 or 12.4, in quotes")

    def choice(self, key: str, default: str, valid: tuple[str, ...]) -> str:
        value = self.text(key, default)
        return value if value in (default, *valid) else self._wrong(key, f"one of {', '.join(valid)}")

    def flag(self, key: str, default: bool) -> bool:
        value = self._take(key)
        return default if value is None else value if isinstance(value, bool) else self._wrong(key, "true or false")

    def number(self, key: str, default: int, most: int) -> int:
        value = self._take(key)
        if value is None:
            return default
        fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most
        return value if fits else self._wrong(key, f"a whole number from 0 to {most}")  # type: ignore[return-value]

    def seconds(self, key: str) -> float:
        value = self._take(key)
        if value is None:
            return 0.0
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 3600
        return float(value) if fits else self._wrong(key, "seconds from 0 to 3600")  # type: ignore[arg-type]

    def _take(self, key: str) -> object:
        self._read.add(key)
        return self.values.get(key)

    def _wrong(self, key: str, expected: str) -> NoReturn:
        raise ConfigError(f"{self.where}: {key} is {self.values[key]!r}; expected {expected}")


def _kind(value: object) -> str:
    words = {dict: "a mapping", list: "a list", str: "a text", bool: "true or false", type(None): "nothing"}
    return words.get(type(value), "a number or a date")
