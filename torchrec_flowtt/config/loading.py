"""YAML to :class:`JobConfig`, with one-line errors that name the key and the nearest known one."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from torchrec_flowtt.config.errors import ConfigError
from torchrec_flowtt.config.overrides import apply_overrides
from torchrec_flowtt.config.schema import JobConfig


class _UniqueKeyLoader(yaml.SafeLoader):
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


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> JobConfig:
    """Reads ``path``, applies ``overrides`` (see :func:`apply_overrides`) and validates the result.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or describes no valid configuration.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"configuration {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"configuration {path}: is not UTF-8 text") from None
    return parse_config(text, overrides, source=str(path))


def parse_config(text: str, overrides: Sequence[str] = (), *, source: str = "<text>") -> JobConfig:
    """Parses YAML text; ``source`` names it in messages.

    Raises:
        ConfigError: as :func:`load_config`.

    >>> parse_config("train: {epochs: 2}", ["train.batch_size=64"]).train.batch_size
    64
    >>> parse_config("train: {epoch: 2}")
    Traceback (most recent call last):
    torchrec_flowtt.config.errors.ConfigError: <text>: unknown key train.epoch; did you mean ...
    """
    try:
        # A SafeLoader subclass: as safe as yaml.safe_load.
        document = yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ConfigError(f"{source}{line}: {error.problem or 'not valid YAML'}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: {error}") from None
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: expected keys and values, found {type(document).__name__}")
    document = apply_overrides(document, overrides)
    try:
        return JobConfig.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_first_message(error, document)}") from None


def _first_message(error: ValidationError, document: dict[str, Any]) -> str:
    details = error.errors(include_url=False)
    # An unknown key is usually the cause of whatever else is wrong, so it goes first.
    detail = next((d for d in details if d["type"] == "extra_forbidden"), details[0])
    path = _path(detail["loc"], document)
    if detail["type"] == "extra_forbidden":
        known = _keys_at(JobConfig, detail["loc"][:-1])
        parent = _path(detail["loc"][:-1], document)
        near = difflib.get_close_matches(str(detail["loc"][-1]), known, n=1, cutoff=0.0)
        full = f"{parent}.{near[0]}" if parent else near[0]
        return f"unknown key {path}; did you mean {full}?"
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "missing":
        return f"{path}: this key is needed"
    if detail["type"] == "value_error":
        return f"{path}: {message}" if path else message
    return f"{path}: {message[0].lower()}{message[1:]}, not {detail['input']!r}"


def _path(loc: tuple[int | str, ...], document: dict[str, Any]) -> str:
    """The key path as the user wrote it: a table rule is named by its ``name``."""
    words: list[str] = []
    here: Any = document
    for key in loc:
        child: Any = None
        if isinstance(here, dict):
            child = here.get(key)
            if key not in here and words and here is not document:
                # pydantic names the branch of a union here; it is no key of the document.
                if not _is_key(key):
                    continue
        elif isinstance(here, list | tuple) and isinstance(key, int) and key < len(here):
            child = here[key]
            if isinstance(child, dict) and isinstance(child.get("name"), str):
                key = child["name"]
        elif not _is_key(key):
            continue
        words.append(str(key))
        here = child
    return ".".join(words)


def _is_key(key: int | str) -> bool:
    return isinstance(key, int) or (key.isidentifier() and key not in ("int", "tuple", "none"))


def _keys_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    for key in loc:
        if isinstance(key, int):
            continue
        nested = _model_in(model.model_fields[key].annotation)
        if nested is None:
            break
        model = nested
    return list(model.model_fields)


def _model_in(annotation: object) -> type[BaseModel] | None:
    # A generic such as tuple[TableRule, ...] passes for a type, but not for a subclass of one.
    if typing.get_origin(annotation) is None and isinstance(annotation, type):
        return annotation if issubclass(annotation, BaseModel) else None
    for argument in typing.get_args(annotation):
        found = _model_in(argument)
        if found is not None:
            return found
    return None
