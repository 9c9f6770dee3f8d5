"""Times of EcoRec, the fastest of the systems that train TT tables with a batch's prefixes shared.

EcoRec (SC'24), measured with its public code: one H200, CUDA 13.0, torch 2.11, fp32 with TF32 off,
sum pooling, medians by CUDA events; its forward agreed with float64 within about 1e-7. They are
constants here because EcoRec needs a build of its own. Its tables are those of the workloads of the
same names (W6p as eight modules of one table, as it has no module of several).
"""

from __future__ import annotations

ECOREC_US = {
    "W1": {"forward": 1250.0, "training": 3450.0},
    "W2p": {"forward": 1250.0, "training": 2770.0},
    "W3p": {"forward": 1560.0, "training": 4260.0},
    "W5p": {"forward": 800.0, "training": 1800.0},
    "W6p": {"forward": 8580.0, "training": 17_400.0},
}
