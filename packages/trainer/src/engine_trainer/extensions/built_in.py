"""The losses and advantages that a configuration can name: built-in ones, and their groups.

The functions are in ``engine_trainer.algorithms``. Their traits stand here, because a configuration
is checked before torch is imported.
"""

from __future__ import annotations

from engine_trainer.extensions.registry import BuiltIn, FunctionRegistry
from engine_trainer.extensions.traits import (
    AdvantageTraits,
    LossTraits,
    PairTraits,
    UnpairedTraits,
)

LOSS_GROUP = "engine_trainer.losses"
ADVANTAGE_GROUP = "engine_trainer.advantages"
_LOSSES = "engine_trainer.algorithms.policy_losses"
_ADVANTAGES = "engine_trainer.algorithms.advantages"
PAIR_LOSS_GROUP = "engine_trainer.pair_losses"
_PAIRS = "engine_trainer.algorithms.preference"
UNPAIRED_LOSS_GROUP = "engine_trainer.unpaired_losses"
_UNPAIRED = "engine_trainer.algorithms.unpaired"
_CLIPS = ("clip_low", "clip_high")
_TOKEN = LossTraits(only_advantages=True, slope="token")
_SEQUENCE = LossTraits(
    only_advantages=True,
    whole_sequences=True,
    aggregation="seq-mean-token-mean",
    slope="sequence",
)

LOSSES = FunctionRegistry(
    kind="loss",
    key="algorithm.loss",
    group=LOSS_GROUP,
    argument="tokens",
    defaults=LossTraits(),
    built_in={
        "ppo": BuiltIn(target=f"{_LOSSES}:ppo", traits=_TOKEN, reads=(*_CLIPS, "dual_clip")),
        "gspo": BuiltIn(target=f"{_LOSSES}:gspo_sequence", traits=_SEQUENCE, reads=_CLIPS),
        "gspo_token": BuiltIn(
            target=f"{_LOSSES}:gspo_token",
            traits=LossTraits(
                only_advantages=True, aggregation="seq-mean-token-mean", slope="token"
            ),
            reads=_CLIPS,
        ),
        "cispo": BuiltIn(target=f"{_LOSSES}:cispo_loss", traits=_TOKEN, reads=_CLIPS),
        "sapo": BuiltIn(target=f"{_LOSSES}:sapo_loss", traits=_TOKEN),
        "gmpo": BuiltIn(target=f"{_LOSSES}:gmpo_loss", traits=_SEQUENCE),
        "dppo_tv": BuiltIn(target=f"{_LOSSES}:dppo_tv", traits=_TOKEN),
        "dppo_kl": BuiltIn(target=f"{_LOSSES}:dppo_kl", traits=_TOKEN),
    },
)

ADVANTAGES = FunctionRegistry(
    kind="advantage",
    key="algorithm.advantage",
    group=ADVANTAGE_GROUP,
    argument="inputs",
    defaults=AdvantageTraits(),
    built_in={
        "grpo": BuiltIn(target=f"{_ADVANTAGES}:grpo", traits=AdvantageTraits()),
        "dr_grpo": BuiltIn(target=f"{_ADVANTAGES}:dr_grpo", traits=AdvantageTraits()),
        "grpo_batch": BuiltIn(target=f"{_ADVANTAGES}:grpo_batch", traits=AdvantageTraits()),
        "gdpo": BuiltIn(target=f"{_ADVANTAGES}:gdpo", traits=AdvantageTraits()),
        "rloo": BuiltIn(target=f"{_ADVANTAGES}:rloo", traits=AdvantageTraits()),
        "reinforce_pp": BuiltIn(
            target=f"{_ADVANTAGES}:reinforce_pp",
            traits=AdvantageTraits(level="token", whiten=True),
            reads=("gamma",),
        ),
        "reinforce_pp_baseline": BuiltIn(
            target=f"{_ADVANTAGES}:dr_grpo", traits=AdvantageTraits(whiten=True)
        ),
        "gae": BuiltIn(
            target=f"{_ADVANTAGES}:gae_advantage",
            traits=AdvantageTraits(level="token", whiten=True, critic=True),
            reads=("gamma", "lam"),
        ),
        "otb": BuiltIn(
            target=f"{_ADVANTAGES}:optimal_token_baseline",
            traits=AdvantageTraits(level="step", needs=("old_log_probs",)),
        ),
    },
)

PAIR_LOSSES = FunctionRegistry(
    kind="loss of pairs",
    key="dpo.loss",
    group=PAIR_LOSS_GROUP,
    argument="pairs",
    defaults=PairTraits(),
    built_in={
        name: BuiltIn(target=f"{_PAIRS}:{function}", traits=traits, reads=("beta",))
        for name, function, traits in (
            ("sigmoid", "sigmoid", PairTraits()),
            ("hinge", "hinge", PairTraits()),
            ("ipo", "ipo", PairTraits()),
            ("robust", "robust", PairTraits()),
            ("sigmoid_norm", "sigmoid_norm", PairTraits(per_token=True)),
            ("simpo", "simpo", PairTraits(reference=False, per_token=True)),
            ("orpo", "orpo", PairTraits(reference=False, per_token=True)),
        )
    },
)

UNPAIRED_LOSSES = FunctionRegistry(
    kind="loss of labelled completions",
    key="kto.loss",
    group=UNPAIRED_LOSS_GROUP,
    argument="rows",
    defaults=UnpairedTraits(),
    built_in={
        "kto": BuiltIn(target=f"{_UNPAIRED}:kto", traits=UnpairedTraits(), reads=("beta",)),
        "apo_zero_unpaired": BuiltIn(
            target=f"{_UNPAIRED}:apo_zero_unpaired",
            traits=UnpairedTraits(baseline=False),
            reads=("beta",),
        ),
    },
)
