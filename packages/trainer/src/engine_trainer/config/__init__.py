"""The configurations of ``engine-train sft``, ``rl``, ``dpo``, ``kto`` and ``rm``.

Every field has a reader. An unknown key or a value of a wrong type is refused by name (see
``binding``).
"""

from __future__ import annotations

from engine_trainer.config.algorithm import (
    AlgorithmSection,
    CorrectionSection,
    CriticSection,
    DynamicSamplingSection,
    KLSection,
    OverlongSection,
)
from engine_trainer.config.evaluation import (
    EvalSection,
    EvalSet,
    HeldoutSection,
    LabelledEvalSection,
)
from engine_trainer.config.preferences import (
    DPOConfig,
    DPOSection,
    KTOConfig,
    KTOSection,
    RewardModelConfig,
)
from engine_trainer.config.rl import RLConfig
from engine_trainer.config.sections import (
    AgentSection,
    ColumnsSection,
    DataSection,
    EngineSection,
    GymDataset,
    GymSection,
    OverlapSection,
    PolicyEngineSection,
    PolicyOptimizer,
    RaySection,
    RewardSection,
    RolloutSection,
    RunSection,
)
from engine_trainer.config.sft import SFTConfig
from engine_trainer.config.teacher import TeacherEngineSection, TeacherSection

__all__ = [
    "AgentSection",
    "AlgorithmSection",
    "ColumnsSection",
    "Config",
    "CorrectionSection",
    "CriticSection",
    "DPOConfig",
    "DPOSection",
    "DataSection",
    "DynamicSamplingSection",
    "EngineSection",
    "EvalSection",
    "EvalSet",
    "GymDataset",
    "GymSection",
    "HeldoutSection",
    "KLSection",
    "KTOConfig",
    "KTOSection",
    "LabelledEvalSection",
    "OverlapSection",
    "OverlongSection",
    "PolicyEngineSection",
    "PolicyOptimizer",
    "RLConfig",
    "RaySection",
    "RewardModelConfig",
    "RewardSection",
    "RolloutSection",
    "RunSection",
    "SFTConfig",
    "TeacherEngineSection",
    "TeacherSection",
]

Config = SFTConfig | RLConfig | DPOConfig | KTOConfig | RewardModelConfig
