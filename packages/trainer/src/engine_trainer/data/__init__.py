"""Data pipeline from files and generated problems to examples, tokens and an exact order."""

from __future__ import annotations

from engine_trainer.data.chat import ChatTokenizer, load_tokenizer
from engine_trainer.data.context import longest_prompt, positions_of
from engine_trainer.data.datasets import (
    Document,
    Prompt,
    PromptDataset,
    SFTDataset,
    TeacherPrompts,
    order_of,
    questions,
    read_examples,
    refuse_videos,
    warn_of_overlap,
)
from engine_trainer.data.heldout import Heldout, heldout_sets, read_heldout, read_responses
from engine_trainer.data.layouts import Example
from engine_trainer.data.order import SampleOrder

__all__ = [
    "ChatTokenizer",
    "Document",
    "Example",
    "Heldout",
    "Prompt",
    "PromptDataset",
    "SFTDataset",
    "SampleOrder",
    "TeacherPrompts",
    "heldout_sets",
    "load_tokenizer",
    "longest_prompt",
    "order_of",
    "positions_of",
    "questions",
    "read_examples",
    "read_heldout",
    "read_responses",
    "refuse_videos",
    "warn_of_overlap",
]
