"""Reasons why a case stays that catches no mutant alone, by a glob of ids."""

from __future__ import annotations

from fnmatch import fnmatchcase

__all__ = ["STAYS", "reason"]

STAYS: dict[str, str] = {
    "plugin.*": (
        "about the descriptor, which the mutants share; "
        "wrong descriptors are in conformance/tests/test_cli.py"
    ),
    "contract.registry": "about the registry's trace, which a wrong engine cannot change",
    "contract.bad_batches": "about `Batch`, which an engine may replace by its own",
    "contract.signatures": (
        "names the argument that would elsewhere be a TypeError somewhere in a rank"
    ),
    "forward.values": (
        "the first case to look at for a value model; others see the same defect after a step"
    ),
    "forward.*": (
        "without a step: it tells a wrong forward pass from a wrong update, "
        "for both of which all of `train.*` fail"
    ),
    "models.*": (
        "about models that no other case makes: engine-minimal failed `models.caps` and no other"
    ),
    "mechanisms.*": (
        "about models that no other case makes; the mutants have none of these mechanisms, and "
        "edits of engine-fsdp are in conformance/mutants/edits/fsdp2.toml"
    ),
    "vision.*": (
        "about a model that no other case makes; the mutants have no tower, and edits of "
        "engine-fsdp are in conformance/mutants/edits/fsdp2.toml"
    ),
    "moe.*": "about a field that no other case has",
    "distill.*": "about members and an output that no other case asks for",
    "train.trajectory": "the broadest: narrower cases catch the same defects with a name",
    "train.*": "narrows down a defect that `train.trajectory` only shows to exist",
    "steps.version": (
        "other cases compare `weight_version` in passing; this one shows what moves it"
    ),
    "steps.call_order*": (
        "the quick tier has the first, and the full tier more orders: one order may hide a defect"
    ),
    "checkpoint.*": (
        "a way for state to travel that no other case takes, "
        "though the seeded defects also break another case"
    ),
    "faults.*": (
        "a fault of the file system that no other case makes; "
        "the seeded defects also break a plain save or load"
    ),
    "export.*": "without a checkpoint or a step: it tells a wrong export from wrong weights",
    "parallel.*": (
        "the layout or combination that it names; "
        "a defect of one layout mostly breaks its combinations too"
    ),
    "contract.defaults": "about defaults of torch, which no other case changes",
    "memory.away": "about parts that are away, which they are on an accelerator alone",
    "memory.chunks": "the only one with padding, chunks and kept weights together",
    "memory.float8": "about FP8, which the mutants do not have",
    "memory.precisions": "the only one whose masters, computation and sums differ in their dtypes",
    "lora.*": "the whole life of an adapter; narrower cases catch single defects as well",
    "rl.*": (
        "the update as a trainer makes it, from inference to step; "
        "the core cases test its parts one by one"
    ),
    **dict.fromkeys(
        (
            "rollout.image*",
            "rollout.bad_images",
            "rollout.videos",
            "rollout.undeclared_images",
            "rollout.undeclared_videos",
        ),
        "about rollouts: wrong ones are in "
        "packages/trainer/tests/helpers/pictured_rollouts_with_defects.py",
    ),
    "rollout.in_flight": (
        "about rollouts: wrong ones are in "
        "packages/trainer/tests/helpers/in_flight_rollouts_with_defects.py"
    ),
    "rollout.*": (
        "about rollouts: wrong ones are in packages/trainer/tests/helpers/rollouts_with_defects.py"
    ),
}


def reason(case: str) -> str:
    """Return the first reason in the order above that fits, or an empty text."""
    return next((text for glob, text in STAYS.items() if fnmatchcase(case, glob)), "")
