"""An inventory as JSON: in the cache, in a bug report, on another machine.

On the hook's hot path, where it turns plain dicts into values; reading and writing text is the caller's.
"""

from __future__ import annotations

from nvct.errors import ConfigError
from nvct.model import SCHEMA, DeviceNode, DriverFile, Gpu, Inventory, MigDevice, Roots
from nvct.record import as_dict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def inventory_to_json(inventory: Inventory) -> dict[str, Any]:
    """The inventory as dicts, lists and scalars, with its `schema`: the fields are those of `nvct.model`."""
    return {"schema": SCHEMA, **as_dict(inventory)}


def inventory_from_json(data: dict[str, Any]) -> Inventory:
    """The inventory that `inventory_to_json` wrote. Raises ConfigError for another schema and for a wrong shape.

    What it raises keeps the cache safe from old files; `shape.check_shape` tells people what is wrong with theirs.
    """
    check_schema(data)
    try:
        return _inventory({name: value for name, value in data.items() if name != "schema"})
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"the saved inventory is damaged ({error}): write it again") from None


def check_schema(data: object) -> None:
    """Raises ConfigError when `data` was not written by a version of nvct that says the same with its fields."""
    found = data.get("schema") if isinstance(data, dict) else None
    if found != SCHEMA:
        raise ConfigError(
            f"the saved inventory has schema {found!r}, and this nvct reads schema {SCHEMA}: "
            "write it again with this version"
        )


def _inventory(fields: dict[str, Any]) -> Inventory:
    fields["roots"] = Roots(**fields["roots"])
    fields["gpus"] = tuple(map(_gpu, fields["gpus"]))
    fields["nodes"] = _nodes(fields["nodes"])
    fields["files"] = tuple(map(_file, fields["files"]))
    fields["missing"] = tuple(fields["missing"])
    fields["extra_nodes"] = {kind: _nodes(nodes) for kind, nodes in fields["extra_nodes"].items()}
    return Inventory(**fields)


def _gpu(fields: dict[str, Any]) -> Gpu:
    mig_devices = tuple(MigDevice(**device) for device in fields["mig_devices"])
    return Gpu(**{**fields, "mig_devices": mig_devices, "drm_nodes": _nodes(fields["drm_nodes"])})


def _nodes(rows: list[dict[str, Any]]) -> tuple[DeviceNode, ...]:
    return tuple(DeviceNode(**row) for row in rows)


def _file(fields: dict[str, Any]) -> DriverFile:
    return DriverFile(**{**fields, "links": tuple(fields["links"])})
