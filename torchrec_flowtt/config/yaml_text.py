"""YAML text to plain Python values, stricter and plainer than PyYAML's own safe loader."""

from __future__ import annotations

import re
from typing import Any

import yaml


class _PlainLoader(yaml.SafeLoader):
    """YAML's safe loader, which would otherwise keep the last of two equal keys silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key_node.value!r} is there twice", key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


# YAML 1.1 reads 1e-3, without a dot, as text; everybody else reads a number.
_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(text: str) -> Any:
    """Parses one YAML document without constructing anything but plain values.

    Raises:
        yaml.YAMLError: it is not YAML, or has a key twice.

    >>> read_yaml("{rate: 1e-3, name: '1e-3'}")
    {'rate': 0.001, 'name': '1e-3'}
    """
    # A SafeLoader subclass: as safe as yaml.safe_load.
    return yaml.load(text, Loader=_PlainLoader)  # noqa: S506
