"""``key.path=value`` settings from the command line, applied to the YAML document."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import yaml

from torchrec_flowtt.config.errors import ConfigError


def apply_overrides(document: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns a copy of ``document`` with every ``key.path=value`` set in it.

    Values are YAML, so ``[8, 8]``, ``null`` and ``{kernel: fbgemm}`` work. An entry of a list is
    addressed by its index or, in ``tables``, by its ``name``.

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
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(f"override {override!r}: {text!r} is not a YAML value") from None
        _assign(document, path.split("."), value, override)
    return document


def _assign(document: dict[str, Any], keys: list[str], value: object, override: str) -> None:
    here: Any = document
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        where = ".".join(keys[:depth]) or "the document"
        if isinstance(here, dict):
            if last:
                here[key] = value
            elif here.get(key) is None:
                here[key] = {}
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
