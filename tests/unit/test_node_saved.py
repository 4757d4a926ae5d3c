"""An inventory to JSON and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvct import fastjson
from nvct.errors import ConfigError
from nvct.model import SCHEMA, DeviceNode, DriverFile, Gpu, Inventory, MigDevice, Roots
from nvct.node.saved import inventory_from_json, inventory_to_json

WORDS = st.text(max_size=12)
NUMBERS = st.integers(0, 1 << 20)
MIG_DEVICES = st.builds(MigDevice, NUMBERS, WORDS, WORDS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS)
NODES = st.lists(st.builds(DeviceNode, WORDS, NUMBERS, NUMBERS), max_size=3).map(tuple)
GPUS = st.builds(
    Gpu,
    NUMBERS,
    WORDS,
    NUMBERS,
    WORDS,
    WORDS,
    WORDS,
    WORDS,
    NUMBERS,
    st.booleans(),
    st.lists(MIG_DEVICES, max_size=3).map(tuple),
    NODES,
)
FILES = st.builds(DriverFile, WORDS, WORDS, WORDS, WORDS, st.lists(WORDS, max_size=2).map(tuple), WORDS)
INVENTORIES = st.builds(
    Inventory,
    WORDS,
    WORDS,
    WORDS,
    st.builds(Roots, WORDS, WORDS, WORDS),
    st.dictionaries(WORDS, NUMBERS, max_size=3),
    st.lists(GPUS, max_size=3).map(tuple),
    NODES,
    st.lists(FILES, max_size=3).map(tuple),
    st.lists(WORDS, max_size=3).map(tuple),
    st.dictionaries(WORDS, NODES, max_size=3),
    st.dictionaries(WORDS, NUMBERS, max_size=2),
    WORDS,
)
SMALL = Inventory("550.54.15", "12.4", "x86_64", Roots(), {"nvidia": 195}, (Gpu(0, "u", 0, "b", "m", "b", "8.0", 1),))


@given(INVENTORIES)
def test_every_inventory_comes_back_equal_through_text(inventory: Inventory) -> None:
    text = json.dumps(inventory_to_json(inventory))
    value: Any = fastjson.loads(text)
    assert inventory_from_json(value) == inventory


def test_the_schema_stands_in_it() -> None:
    assert inventory_to_json(SMALL)["schema"] == SCHEMA


@pytest.mark.parametrize("schema", [SCHEMA + 1, None, "1"])
def test_another_schema_is_refused_naming_both(schema: object) -> None:
    with pytest.raises(ConfigError, match=rf"schema {schema!r}.*schema {SCHEMA}"):
        inventory_from_json({**inventory_to_json(SMALL), "schema": schema})


@pytest.mark.parametrize(
    "damage",
    [
        {"gpus": None},
        {"gpus": [{"index": 0}]},
        {"roots": {"root": "/", "elsewhere": "/"}},
        {"files": [7]},
        {"surprise": 1},
        {"gpus": [{}]},
    ],
)
def test_a_damaged_inventory_is_a_config_error(damage: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="damaged"):
        inventory_from_json({**inventory_to_json(SMALL), **damage})


@pytest.mark.parametrize("missing", ["gpus", "driver_version", "roots"])
def test_a_missing_field_is_a_config_error_that_names_it(missing: str) -> None:
    data = inventory_to_json(SMALL)
    del data[missing]
    with pytest.raises(ConfigError, match=missing):
        inventory_from_json(data)


@pytest.mark.parametrize("data", [None, [], 7, "x"])
def test_what_is_no_object_is_a_config_error(data: Any) -> None:
    with pytest.raises(ConfigError):
        inventory_from_json(data)
