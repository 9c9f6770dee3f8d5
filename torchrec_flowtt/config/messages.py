"""Validation errors in plain words: which key, what it must be, and the nearest known key."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from torchrec_flowtt.config.schema import JobConfig

Location = tuple[int | str, ...]


def first_mistake(error: ValidationError, document: dict[str, Any]) -> tuple[Location, str]:
    """The place of the first mistake, and one line that says what it is."""
    details = error.errors(include_url=False)
    # An unknown key is usually the cause of whatever else is wrong, so it goes first.
    detail = next((d for d in details if d["type"] == "extra_forbidden"), details[0])
    loc = detail["loc"]
    path = _path(loc, document)
    if detail["type"] == "extra_forbidden":
        return loc, f"unknown key {path}{_suggestion(loc, path, document)}"
    if detail["type"] == "missing":
        return loc, f"{path}: this key is needed"
    if detail["type"] == "value_error":
        message = detail["msg"].removeprefix("Value error, ")
        return loc, f"{path}: {message}" if path else message
    return loc, f"{path}: {_expectation(detail)}, not {_shortened(detail['input'])}"


def known_paths(model: type[BaseModel] = JobConfig, prefix: str = "") -> list[str]:
    """Every key path of the configuration; those of a list's entries are not among them."""
    paths = []
    for key, field in model.model_fields.items():
        paths.append(f"{prefix}{key}")
        annotation = field.annotation
        if isinstance(annotation, type) and typing.get_origin(annotation) is None:
            if issubclass(annotation, BaseModel):
                paths += known_paths(annotation, f"{prefix}{key}.")
    return paths


def _suggestion(loc: Location, path: str, document: dict[str, Any]) -> str:
    key = str(loc[-1])
    parent = _path(loc[:-1], document)
    everywhere = known_paths()
    if key in everywhere and "." in key:
        first, _, rest = key.partition(".")
        return f"; in YAML it is nested: {first}: {{{rest.replace('.', ': {')}: ...}}"
    near = difflib.get_close_matches(key, _keys_at(JobConfig, loc[:-1]), n=1)
    if near:
        return f"; did you mean {parent}.{near[0]}?" if parent else f"; did you mean {near[0]}?"
    same = [known for known in everywhere if known.rpartition(".")[2] == key]
    found = same or difflib.get_close_matches(path, everywhere, n=1, cutoff=0.7)
    if not found:
        ends = {known.rpartition(".")[2]: known for known in everywhere}
        found = [ends[end] for end in difflib.get_close_matches(key, ends, n=1, cutoff=0.8)]
    return f"; did you mean {' or '.join(found)}?" if found else ""


_WORDS = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "path_type": "must be a path",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be one of {expected}",
}


def _expectation(detail: Mapping[str, Any]) -> str:
    kind, loc = detail["type"], detail["loc"]
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"must be a mapping with keys {', '.join(_keys_at(JobConfig, loc))}"
    if loc[0] == "tables" and loc[2:3] == ("tt_ranks",) and kind in ("int_type", "tuple_type"):
        return "must be a whole number or a list of them"
    entries = "mappings" if loc == ("tables",) else "whole numbers"
    if kind == "tuple_type":
        return f"must be a list of {entries}"
    if kind == "too_short":
        return f"must be a list of at least {detail['ctx']['min_length']} {entries}"
    if kind in _WORDS:
        return _WORDS[kind].format(**detail.get("ctx", {}))
    message: str = detail["msg"]
    return f"{message[0].lower()}{message[1:]}"


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _path(loc: Location, document: dict[str, Any]) -> str:
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
    if isinstance(key, int):
        return True
    return key.isidentifier() and key not in ("int", "tuple", "none", "constrained")


def _keys_at(model: type[BaseModel], loc: Location) -> list[str]:
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
