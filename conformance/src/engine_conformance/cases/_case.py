"""Definition, registration and execution of a case.

A case is one MUST of the contract as a function that runs against any engine by name.
"""

from __future__ import annotations

import inspect
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from typing import Literal

from engine_api.capabilities import MECHANISMS, Capability
from engine_api.errors import ConfigError, UnsupportedCapability
from engine_api.plugin import is_older
from engine_conformance.cases._target import Target
from engine_conformance.compare import ConformanceFailure
from engine_conformance.rank_failure import RankError
from engine_conformance.results import Outcome, Status
from engine_conformance.seeds import use_seed

__all__ = [
    "CASES",
    "FLOAT32",
    "PROFILES",
    "AcceptedUndeclared",
    "Case",
    "CaseFunction",
    "RefusedHere",
    "SkipCase",
    "case",
    "load_cases",
    "must",
    "run_case",
]

CaseFunction = Callable[[Target], "float | None"]
"""Function of a case.

It raises `ConformanceFailure` (or the pool's `RankError`), and returns the margin where
it compared numbers.
"""

PROFILES = ("engine", "rl", "rollout")
LM = "language_model"
VALUE = "value_model"
BOTH_PRECISIONS = ("float32", "bfloat16")
FLOAT32 = ("float32",)
# The family of the models that have experts.
EXPERTS = ("qwen3_moe",)
# In the order in which they run and are listed.
_MODULES = (
    "plugin",
    "contract",
    "refusals",
    "refusal",
    "forward",
    "models",
    "train",
    "objectives",
    "moe",
    "distill",
    "mechanisms",
    "vision",
    "steps",
    "order",
    "checkpoint",
    "portable",
    "faults",
    "export",
    "parallel",
    "layouts",
    "memory",
    "lora",
    "rl",
    "rollout",
    "rollout_sync",
    "rollout_in_flight",
    "rollout_images",
)
CASES: dict[str, Case] = {}
_HINTS = "If this fails"
_REFUSALS = (ConfigError, UnsupportedCapability)
# The hint of a model that the engine does not build.
_REFUSED = (
    "the engine is asked for every model family of the suite, unless its descriptor states the "
    'families that it builds, EnginePlugin(families=("llama",)): then no other is made.'
)
# The arguments of a remedy's command, and the name that begins a requirement (PEP 508).
_INSTALL = re.compile(r"pip install ([^\n`]+)")
_DISTRIBUTION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Several ranks are data parallel, unless a layout says otherwise.
_MODEL_PARALLEL = frozenset(
    {Capability.TP, Capability.PP, Capability.CP, Capability.EP, Capability.ULYSSES}
)


class SkipCase(Exception):
    """Error of a case that cannot be decided on this machine, with the reason as its text."""


class RefusedHere(Exception):
    """Error of a case whose subject is refused in these settings, as the contract allows."""


class AcceptedUndeclared(ConformanceFailure):
    """Failure of an engine that did not refuse a capability it does not declare."""

    def __init__(self, capability: Capability, how: str) -> None:
        remedy = f"declare it, or raise UnsupportedCapability({str(capability)!r})"
        super().__init__(
            f"undeclared capability {str(capability)!r}", f"{how} was silently accepted; {remedy}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A MUST of the contract.

    Attributes:
        id: ``module.name``; never changes its meaning.
        since: the contract version from which it holds; an engine written for an older one is not
            asked for it.
        requires: capabilities without which it does not apply; the first one is its group.
        probes: the capability whose *absence* it shows: it runs only where that is not declared.
        world: world sizes at which it says something.
        dtypes: precisions of computation at which it says something: both, unless the case says why
            not.
        model_types: which kinds of engine it is about.
        profile: ``engine``, ``rl`` or ``rollout``.
        quick: part of the quick tier; ``once``, on the smallest number of ranks of the run alone.
        slow: takes more than about ten seconds.
        provisional: reported, but no part of the verdict until the next minor version.
        partner: is about two engines, and runs only where a second one is named.
        alone: no other case runs at the same time, since it measures what processes share: the
            memory of a device, or time.
        families: the model families that it is about, of which the engine must build one; empty if
            any family will do.
        in_flight: is about rollouts whose descriptor has `in_flight`.
    """

    id: str
    function: CaseFunction
    since: str
    requires: tuple[Capability, ...]
    probes: Capability | None
    world: tuple[int, ...]
    dtypes: tuple[str, ...]
    model_types: tuple[str, ...]
    profile: str
    quick: bool | Literal["once"]
    slow: bool
    provisional: bool
    partner: bool
    alone: bool
    families: tuple[str, ...]
    in_flight: bool = False

    @property
    def must(self) -> str:
        """The requirement, one line."""
        return inspect.cleandoc(self.function.__doc__ or "").splitlines()[0]

    @property
    def details(self) -> str:
        """The docstring's text between the requirement and the hints."""
        text = inspect.cleandoc(self.function.__doc__ or "").partition(_HINTS)[0]
        return " ".join(text.partition("\n")[2].split())

    @property
    def hints(self) -> str:
        """The things to look at when the case fails, and known defects that it was made from."""
        return self._section(_HINTS)

    def _section(self, title: str) -> str:
        paragraphs = inspect.cleandoc(self.function.__doc__ or "").split("\n\n")
        found = [
            " ".join(p.split()).removeprefix(title).lstrip(": ")
            for p in paragraphs
            if p.startswith(title)
        ]
        return found[0] if found else ""

    @property
    def group(self) -> str:
        """The group of the case: ``core``, the capability that it is about, or its profile."""
        if self.profile != "engine":
            return self.profile
        return str(self.requires[0]) if self.requires else "core"

    def is_quick(self, world: int, *, first: int) -> bool:
        """Return whether the quick tier has this case on so many ranks; ``first`` is the fewest."""
        return world == first if self.quick == "once" else self.quick

    def why_not(self, target: Target) -> str | None:
        """Return why this case does not apply to ``target``, or None."""
        have = target.capabilities
        if is_older(target.resolution.plugin.contract, self.since):
            return (
                f"since contract {self.since}, "
                f"the engine was written for {target.resolution.plugin.contract}"
            )
        missing = self._undeclared(target)
        if missing:
            return f"not declared: {', '.join(missing)}"
        if self.probes in have:
            return f"{self.probes} is declared"
        if self.families and not any(target.builds(name) for name in self.families):
            return f"model family not declared: {', '.join(self.families)}"
        if self.partner and target.partner is None:
            return "no second engine: name one with --partner"
        if target.model_type not in self.model_types:
            return f"says nothing of a {target.model_type}"
        if target.world not in self.world:
            return f"says nothing at world {target.world}"
        return None if target.dtype in self.dtypes else f"says nothing in {target.dtype}"

    def _undeclared(self, target: Target) -> list[str]:
        """Return what the case needs on ``target`` and the plug-in does not declare."""
        have = target.capabilities
        missing = [str(c) for c in self.requires if c not in have]
        if self.in_flight and not target.resolution.plugin.in_flight:
            missing.append("in_flight")
        if (
            target.world > 1
            and Capability.DP not in have
            and not _MODEL_PARALLEL & {*self.requires, *target.spread}
        ):
            missing.append(str(Capability.DP))
        if target.dtype == "bfloat16" and self.profile != "rollout" and Capability.BF16 not in have:
            missing.append(str(Capability.BF16))
        return missing


def case(
    *,
    id: str,  # noqa: A002 - the word that the reports use
    since: str = "1.0",
    requires: tuple[Capability, ...] = (),
    probes: Capability | None = None,
    world: tuple[int, ...] = (1, 2, 4),
    dtypes: tuple[str, ...] = BOTH_PRECISIONS,
    model_types: tuple[str, ...] = (LM,),
    profile: str = "engine",
    quick: bool | Literal["once"] = False,
    slow: bool = False,
    provisional: bool = False,
    partner: bool = False,
    alone: bool = False,
    families: tuple[str, ...] = (),
    in_flight: bool = False,
) -> Callable[[CaseFunction], CaseFunction]:
    """Register a case, whose arguments `Case` explains."""

    def register(function: CaseFunction) -> CaseFunction:
        assert id not in CASES, f"two cases are called {id}"
        assert function.__doc__, f"{id} has no MUST"
        assert profile in PROFILES, f"{id} is of no profile"
        CASES[id] = Case(
            id=id,
            function=function,
            since=since,
            requires=requires,
            probes=probes,
            world=world,
            dtypes=dtypes,
            model_types=model_types,
            profile=profile,
            quick=quick,
            slow=slow,
            provisional=provisional,
            partner=partner,
            alone=alone or profile == "rollout",
            families=families or (EXPERTS if Capability.MOE in (*requires, probes) else ()),
            in_flight=in_flight,
        )
        return function

    return register


def load_cases() -> dict[str, Case]:
    """Return every case by id, in the order in which they run."""
    for module in _MODULES:
        import_module(f"engine_conformance.cases.{module}")
    order = sorted(
        CASES.values(), key=lambda one: _MODULES.index(one.id.split(".")[0])
    )  # stable within a prefix
    return {one.id: one for one in order}


def must(condition: bool, quantity: str, problem: str, *, where: str = "") -> None:
    """Raise `ConformanceFailure` unless ``condition``."""
    if not condition:
        raise ConformanceFailure(quantity, problem, where=where)


def _is_for_want_of_a_package(failure: RankError, one: Case) -> bool:
    """Return whether an engine refuses a case's mechanism and names a package that is not there.

    Every rank must raise ``UnsupportedCapability`` that names the mechanism, with a remedy
    ``pip install NAME`` of which one name is not installed here.
    """
    if not MECHANISMS & {*one.requires} or not failure.raised_everywhere(UnsupportedCapability):
        return False
    return all(
        f"capability {str(one.requires[0])!r}" in rank.text and _names_absent_package(rank.text)
        for rank in failure.failures
    )


def _names_absent_package(text: str) -> bool:
    words = " ".join(_INSTALL.findall(text)).split()
    names = [found.group() for word in words if (found := _DISTRIBUTION.match(word))]
    return any(not _is_installed(name) for name in names)


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _outcome_of_failure(
    failure: RankError, one: Case, *, may_refuse: bool, seconds: float
) -> Outcome:
    """Return how a case ended in which a rank raised, died or stalled."""
    if may_refuse and failure.raised_everywhere(*_REFUSALS):
        return Outcome(status="refused", seconds=seconds, message=failure.failures[0].error)
    if _is_for_want_of_a_package(failure, one):
        return Outcome(status="refused", seconds=seconds, message=failure.failures[0].error)
    if failure.refusal:
        return Outcome(status="failed", seconds=seconds, message=failure.refusal, hints=_REFUSED)
    status: Status = "timeout" if failure.timed_out else "failed"
    return Outcome(status=status, seconds=seconds, message=str(failure))


def run_case(one: Case, target: Target, *, may_refuse: bool = False) -> Outcome:
    """Run one case and report how it ended, without raising for anything the engine does.

    With ``may_refuse`` a refusal of the configuration on every rank is as good as a right result.
    """
    began = time.monotonic()

    def outcome(status: Status, message: str = "", margin: float | None = None) -> Outcome:
        return Outcome(
            status=status, seconds=time.monotonic() - began, margin=margin, message=message
        )

    if reason := one.why_not(target):
        return outcome("not-run", reason)
    use_seed(target.seed)
    try:
        margin = one.function(target)
    except SkipCase as skip:
        return outcome("not-run", str(skip))
    except RefusedHere as refusal:
        return outcome("refused", str(refusal))
    except AcceptedUndeclared as failure:
        return outcome("accepted-undeclared", str(failure))
    except ConformanceFailure as failure:
        return outcome("failed", str(failure), failure.margin)
    except RankError as failure:
        seconds = time.monotonic() - began
        return _outcome_of_failure(failure, one, may_refuse=may_refuse, seconds=seconds)
    except Exception:  # noqa: BLE001 - the boundary of one case: the next one must still run
        return outcome("suite-error", traceback.format_exc())
    return outcome("refused" if one.probes else "passed", margin=margin)
