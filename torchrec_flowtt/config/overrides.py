"""``key.path=value`` settings from the command line, applied to the YAML document."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import yaml

from torchrec_flowtt.config.errors import ConfigError
from torchrec_flowtt.config.schema import JobConfig
from torchrec_flowtt.config.yaml_text import read_yaml


def apply_overrides(document: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns a copy of ``document`` with every ``key.path=value`` set in it.

    Values are YAML, so ``[8, 8]``, ``null`` and ``{kernel: fbgemm}`` work. An entry of a list is
    addressed by its index or, in ``tables``, by its ``name``; if the document lacks the list, it
    is an entry of the default one.

    Raises:
        ConfigError: no ``=``, a value that is not YAML, or a path through something that has no
            such entry.

    >>> apply_overrides({"tables": [{"name": "cross_*"}]}, ["tables.cross_*.tt_ranks=[8, 4]"])
    {'tables': [{'name': 'cross_*', 'tt_ranks': [8, 4]}]}
    """
    document = copy.deepcopy(document)
    for override in overrides:
        path, equals, text = override.partition("=")
        path = path.strip()
        if not equals or not all(path.split(".")):
            raise ConfigError(
                f"override {override!r}: expected key.path=value, such as train.epochs=3"
            )
        try:
            value = read_yaml(text)
        except yaml.YAMLError:
            raise ConfigError(f"override {override!r}: {text!r} is not a YAML value") from None
        _assign(document, path.split("."), value, override)
    return document


def override_location(document: dict[str, Any], override: str) -> tuple[int | str, ...]:
    """Where in ``document`` an override has set its value, with list entries as positions."""
    place: list[int | str] = []
    here: Any = document
    for key in override.partition("=")[0].strip().split("."):
        step: int | str = _entry(here, key, "", override) if isinstance(here, list) else key
        place.append(step)
        here = here[step]
    return tuple(place)


def _default_at(keys: Sequence[str]) -> Any:
    here: Any = JobConfig().model_dump(mode="json")
    for key in keys:
        here = here.get(key) if isinstance(here, dict) else None
    return here


def _assign(document: dict[str, Any], keys: list[str], value: object, override: str) -> None:
    here: Any = document
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        where = ".".join(keys[:depth]) or "the document"
        if isinstance(here, dict):
            if last:
                here[key] = value
            elif here.get(key) is None:
                default = _default_at(keys[: depth + 1])
                here[key] = default if isinstance(default, list) else {}
            here = here[key]
        elif isinstance(here, list):
            index = _entry(here, key, where, override)
            if last:
                here[index] = value
            here = here[index]
        else:
            raise ConfigError(f"override {override!r}: {where} is {here!r} and has no keys")


def _entry(entries: list[Any], key: str, where: str, override: str) -> int:
    names = [entry.get("name") if isinstance(entry, dict) else None for entry in entries]
    if key in names:
        return names.index(key)
    if key.isdecimal() and int(key) < len(entries):
        return int(key)
    choices = [str(name) for name in names if name is not None]
    listed = f" named {', '.join(choices)}" if choices else ""
    raise ConfigError(
        f"override {override!r}: {where} has no entry {key!r}; it has {len(entries)}"
        f" entries{listed}, counted from 0"
    )
