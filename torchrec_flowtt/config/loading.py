"""YAML to :class:`JobConfig`, with one-line errors that name the key and the nearest known one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from torchrec_flowtt.config.errors import ConfigError
from torchrec_flowtt.config.messages import Location, first_mistake
from torchrec_flowtt.config.overrides import apply_overrides, override_location
from torchrec_flowtt.config.schema import JobConfig
from torchrec_flowtt.config.yaml_text import read_yaml


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
        document = read_yaml(text)
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
    changed = apply_overrides(document, overrides)
    config, mistake = _validated(changed)
    if config is not None:
        return config
    loc, message = mistake
    culprit = _culprit(document, changed, overrides, loc, message)
    raise ConfigError(f"{source if culprit is None else culprit}: {message}")


def _validated(document: dict[str, Any]) -> tuple[JobConfig | None, tuple[Location, str]]:
    try:
        return JobConfig.model_validate(document), ((), "")
    except ValidationError as error:
        return None, first_mistake(error, document)


def _culprit(
    document: dict[str, Any],
    changed: dict[str, Any],
    overrides: Sequence[str],
    loc: Location,
    message: str,
) -> str | None:
    """The override that made the mistake, or None when it is the file's own."""
    if not overrides or _validated(document)[1][1] == message:
        return None
    related = []
    for override in overrides:
        place = override_location(changed, override)
        shorter = min(len(place), len(loc))
        if place[:shorter] == loc[:shorter]:
            related.append(override)
    if related:
        return f"override {related[-1]!r}"
    return f"override {overrides[0]!r}" if len(overrides) == 1 else None
