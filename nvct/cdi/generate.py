"""The spec of this node, from its settings and inventory and what an administrator wants it to be."""

from __future__ import annotations

import os
import shutil
from stat import S_IMODE

from nvct.cdi.devices import GPU, IMEX, INDEX, MANAGEMENT, UUID, check_tokens, devices_of
from nvct.cdi.names import MANAGEMENT_VENDOR, VENDOR
from nvct.cdi.spec import NodeMode, check_kind, spec_of
from nvct.edits import HOOK
from nvct.errors import ConfigError
from nvct.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from nvct.model import DeviceEdit, Inventory
    from nvct.settings import Settings

# By mode; a mode that has no class here is one.
_CLASSES = {GPU: "gpu", MANAGEMENT: "gpu", IMEX: "imex-channel"}
_VENDORS = {MANAGEMENT: MANAGEMENT_VENDOR}


@record
class Choices:
    """What a spec is to be. `vendor` and `class_` are those of the mode when "". `tokens`: which GPUs, as
    NVIDIA_VISIBLE_DEVICES has them. `hook`: the path of nvct's small hook, "" for the one beside nvct; `hooks` is false
    for a spec without it. `version`: the cdiVersion to say, "" for the lowest.
    """

    mode: str = GPU
    namings: tuple[str, ...] = (INDEX, UUID)
    tokens: tuple[str, ...] = ("all",)
    vendor: str = ""
    class_: str = ""
    hooks: bool = True
    hook: str = ""
    version: str = ""

    @property
    def kind(self) -> str:
        vendor = self.vendor or _VENDORS.get(self.mode, VENDOR)
        return f"{vendor}/{self.class_ or _CLASSES.get(self.mode, self.mode)}"

    def check(self) -> None:
        """Raise ChoiceError for what can be on no node."""
        check_kind(self.kind)
        check_tokens(self.mode, self.tokens)


@record
class Generated:
    """A spec, every device node that it hands out, and warnings about it."""

    spec: dict[str, Any]
    nodes: tuple[DeviceEdit, ...]
    warnings: tuple[str, ...]


def generate(inventory: Inventory, settings: Settings, choices: Choices) -> Generated:
    """Make the spec that is wanted. Raises ChoiceError for choices that exclude one another, RequestError for a device
    that is not there, DriverError for a node that has nothing of the kind, ConfigError where the hook is not to be
    found.
    """
    devices = devices_of(choices.mode, inventory, settings, choices.namings, choices.tokens)
    hook = (choices.hook or _find_hook()) if choices.hooks else ""
    parts = (devices.common, *(device.edits for device in devices.devices))
    nodes = tuple({edit.source: edit for part in parts for edit in part.devices}.values())
    spec = spec_of(devices, choices.kind, hook, inventory.architecture, _modes(nodes), choices.version)
    return Generated(spec, nodes, devices.warnings)


def _find_hook() -> str:
    """The hook in nvct's own tree, or where programs are installed."""
    tree = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    own = f"{tree}/hooks/{HOOK}"
    if os.access(own, os.X_OK):
        return own
    found = shutil.which(HOOK, path="/usr/local/bin:/usr/bin")
    if not found:
        raise ConfigError(f"no {HOOK} in {tree}/hooks, /usr/local/bin or /usr/bin; name it with --hook, or --no-hooks")
    return found


def _modes(nodes: tuple[DeviceEdit, ...]) -> dict[str, NodeMode]:
    """By path on this host; a node that cannot be looked at, of another machine's inventory for one, is left out."""
    found = {}
    for node in nodes:
        try:
            status = os.lstat(node.source)
        except OSError:
            continue
        found[node.source] = NodeMode(S_IMODE(status.st_mode), status.st_uid, status.st_gid)
    return found
