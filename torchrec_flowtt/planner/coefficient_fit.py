"""Fits the coefficients of a calibration to measurements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import numpy as np

from torchrec_flowtt.planner.calibration import (
    SMALL_CALL,
    Bags,
    Calls,
    Coefficients,
    Ids,
    Measurement,
    Phase,
    Precision,
)
from torchrec_flowtt.planner.kernel_families import Family, lookup_work

_TERMS = 5


def fit(measurements: Iterable[Measurement], device: str) -> tuple[Coefficients, ...]:
    """Coefficients of all kinds of lookups among `measurements`."""
    kinds: dict[tuple[Family, Calls, Precision, Bags, Ids], list[Measurement]] = {}
    for m in measurements:
        kind: tuple[Family, Calls, Precision, Bags, Ids] = (
            lookup_work(m.spec, device).family,
            "small" if m.lookups < SMALL_CALL else "large",
            m.precision,
            "single" if m.pooling_factor == 1 else "pooled",
            m.ids,
        )
        kinds.setdefault(kind, []).append(m)
    phases: tuple[Phase, ...] = ("forward", "backward")
    found = []
    for (family, calls, precision, bags, ids), measured in kinds.items():
        terms = np.array([_terms(m, device) for m in measured])
        if len({m.lookups for m in measured}) < 2:
            terms[:, 1:3] = 0.0  # nothing tells them from what a call costs anyway
        for phase in phases:
            us = np.array([m.us(phase) for m in measured])
            values, error = _least_relative_errors(terms, us)
            fixed, lookup, column, flop, parameter = (float(f"{v:.4g}") for v in values)
            found.append(
                Coefficients(
                    family=family,
                    calls=calls,
                    precision=precision,
                    bags=bags,
                    ids=ids,
                    phase=phase,
                    fixed=fixed,
                    lookup=lookup,
                    column=column,
                    flop=flop,
                    parameter=parameter,
                    error=round(error, 3),
                    points=len(measured),
                )
            )
    return tuple(found)


def _terms(m: Measurement, device: str) -> list[float]:
    work = lookup_work(m.spec, device)
    n = m.lookups
    return [1.0, n, n * work.columns, n * work.flops, m.spec.num_parameters]


def _least_relative_errors(
    terms: np.ndarray[tuple[int, int], np.dtype[np.float64]],
    us: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> tuple[list[float], float]:
    """Coefficients of at least 0, by trying which of the few are more; and their error."""
    relative = terms / us[:, None]
    scale = relative.max(axis=0)
    usable = scale > 0
    best: tuple[float, list[float]] = (math.inf, [])
    for chosen in itertools.product((False, True), repeat=_TERMS):
        used = [i for i in range(_TERMS) if chosen[i]]
        if not used or not usable[used].all():
            continue
        part = relative[:, used] / scale[used]
        solution = np.linalg.lstsq(part, np.ones(len(us)), rcond=None)[0]
        if (solution < 0).any():
            continue
        error = float(np.sqrt(np.mean((part @ solution - 1.0) ** 2)))
        if error < best[0] - 1e-9:
            values = [0.0] * _TERMS
            for i, value in zip(used, solution, strict=True):
                values[i] = float(value / scale[i])
            best = (error, values)
    return best[1], best[0]
