"""A search for the cause of wrong log-probs, which compares readings with variants of the oracle.

A reading is what an engine or a rollout said of the tokens of some documents. Where it is not what
the oracle says, each suspect of a table is tried: the oracle with one defect. The suspect whose
log-probs are those of the reading is named.
"""

from __future__ import annotations

from engine_conformance.diagnosis.build import build_oracle, read_oracle
from engine_conformance.diagnosis.layers import LayerFinding, compare_layers
from engine_conformance.diagnosis.readings import Document, Finding, Place, Reading, Subject
from engine_conformance.diagnosis.search import diagnose
from engine_conformance.diagnosis.suspects import CAUSES

__all__ = [
    "CAUSES",
    "Document",
    "Finding",
    "LayerFinding",
    "Place",
    "Reading",
    "Subject",
    "build_oracle",
    "compare_layers",
    "diagnose",
    "read_oracle",
]
