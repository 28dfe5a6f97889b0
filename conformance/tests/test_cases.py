"""Tests of properties that all cases share: a MUST, hints, a group, and a quick tier.

In addition, the field's bugs that the cases were made from.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine_api.capabilities import Capability
from engine_api.errors import ConfigError, UnsupportedCapability
from engine_api.plugin import EnginePlugin, is_older
from engine_conformance.cases import Case, Target, load_cases, run_case
from engine_conformance.cases._expect import require_refusal_by_name
from engine_conformance.cases.contract import _member_problems
from engine_conformance.compare import ConformanceFailure
from engine_conformance.explain import explain_case
from engine_conformance.rank_failure import REFUSED, FailedRank, RankError
from engine_conformance.report.view import facts
from report_samples import made, row

CASES = load_cases()
CONTRACT = (Path(__file__).parents[2] / "docs" / "contract.md").read_text()
# Silent bugs of engines and rollouts in public threads; each is named by a case that would have
# caught it.
FIELD = (
    "verl #4710",
    "AReaL PR 335",
    "torchtitan #2318",
    "verl #3294",
    "verl #4021",
    "verl PR 4250",
    "Megatron-LM #6660",
    "Megatron-LM #5974",
    "Megatron-LM #149",
    "Megatron-LM #7452",
    "NeMo-RL #227",
    "vLLM #48277",
    "vLLM PR 43987",
    "prime-rl #2562",
    "Megatron-LM #4590",
    "miles #3231",
    "Automodel #3191",
    "NeMo-RL #3171",
    "NeMo-RL #3345",
    "Megatron-Bridge #5680",
    "NeMo-RL #3544",
    "verl #7986",
    "vime #133",
    "vLLM #58157",
    "vLLM #48312",
    "verl #1720",
    "NeMo-RL #671",
)
# Capabilities that are part of the descriptor's vocabulary before any engine offers them.
NO_CASE_YET = {Capability.FP16, Capability.FP8}


@pytest.mark.parametrize("one", CASES.values(), ids=lambda one: one.id)
def test_a_case_says_what_it_demands(one: Case) -> None:
    assert re.search(r"\bMUST\b", one.must), one.must
    assert one.must.endswith("."), one.must
    assert one.hints or one.probes, "no paragraph `If this fails: …`"
    assert set(one.world) <= {1, 2, 4}
    assert one.profile in ("engine", "rl", "rollout")


@pytest.mark.parametrize("one", CASES.values(), ids=lambda one: one.id)
def test_the_contract_has_an_anchor_for_every_case(one: Case) -> None:
    assert f'<a id="{one.id}"></a>' in CONTRACT, (
        f"docs/contract.md demands nothing that {one.id} shows"
    )


def test_the_contract_names_no_case_that_is_not_there() -> None:
    anchors = set(re.findall(r'<a id="([a-z_]+\.[^"]+)"></a>', CONTRACT))
    assert not anchors - set(CASES)


@pytest.mark.parametrize("thread", FIELD)
def test_a_bug_of_the_field_has_a_case_that_names_it(thread: str) -> None:
    texts = [" ".join((one.function.__doc__ or "").split()) for one in CASES.values()]
    project, number = thread.rsplit(" ", 1)
    assert any(
        re.search(rf"{re.escape(project.split(' ')[0])}\b[^.:]*{re.escape(number)}\b", text)
        for text in texts
    )


def test_every_capability_is_tested_where_declared_and_probed_where_not() -> None:
    shown = {capability for one in CASES.values() for capability in one.requires}
    probed = {one.probes for one in CASES.values() if one.probes}
    assert set(Capability) - shown <= NO_CASE_YET
    assert probed == set(Capability)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_in_one_precision_can_show_every_capability(dtype: str) -> None:
    shown = {one.group for one in CASES.values() if dtype in one.dtypes and not one.probes}
    assert {str(one) for one in set(Capability) - NO_CASE_YET - {Capability.DP}} <= shown


def test_an_engine_without_bfloat16_is_asked_for_nothing_in_it() -> None:
    plugin = EnginePlugin(name="full precision", contract="1.2", rows=(), capabilities=frozenset())
    for dtype, told in (("float32", None), ("bfloat16", "not declared: bf16")):
        target = Target(backend="full precision", root=Path(), dtype=dtype)
        target.__dict__["resolution"] = SimpleNamespace(plugin=plugin)
        assert CASES["train.trajectory"].why_not(target) == told


def test_the_quick_tier_has_something_of_every_core_group() -> None:
    quick = {one.id.split(".")[0] for one in CASES.values() if one.quick}
    assert quick >= {"plugin", "contract", "forward", "train", "steps", "checkpoint", "export"}


class Older:
    """Engine class written for contract 1.0."""

    def get_per_tensor_param_shard(self, *, dtype: object = None) -> None:
        """Do nothing, with the parameters of contract 1.0."""


def test_an_engine_is_asked_only_for_what_the_contract_had_that_it_was_written_for() -> None:
    assert not _member_problems(Older, "get_per_tensor_param_shard", "1.0")
    assert "adapter" in _member_problems(Older, "get_per_tensor_param_shard", "1.1")[0]
    assert [is_older(stated, "1.1") for stated in ("1.0", "1.1", "1.10", "2.0", "one")] == [
        True,
        *[False] * 4,
    ]
    plugin = EnginePlugin(name="older", contract="1.0", rows=(), capabilities=frozenset(Capability))
    target = Target(backend="older", root=Path())
    target.__dict__["resolution"] = SimpleNamespace(plugin=plugin)
    assert "written for 1.0" in (CASES["lora.base"].why_not(target) or "")
    assert CASES["lora.train"].why_not(target) is None


@pytest.mark.parametrize(
    ("capability", "package", "status"),
    [
        ("linear_attention", "no-such-distribution", "refused"),
        ("linear_attention", "pytest no-such-distribution>=1", "refused"),
        # The package is there, or the refusal is of something else.
        ("linear_attention", "pytest", "failed"),
        ("moe", "no-such-distribution", "failed"),
    ],
)
def test_a_mechanism_is_refused_for_want_of_a_package_that_the_refusal_names(
    capability: str, package: str, status: str
) -> None:
    error = UnsupportedCapability(capability, why="no kernel", remedy=f"pip install {package}")

    def refuse(_: Target) -> None:
        name = f"{UnsupportedCapability.__module__}.{UnsupportedCapability.__qualname__}"
        text = f"{REFUSED} lfm2\n{error}"
        failed = FailedRank(rank=0, kind="raised", text=text, exception=name)
        raise RankError("refuse", 1, [failed], 0.0)

    capabilities = frozenset({Capability.LINEAR_ATTENTION})
    plugin = EnginePlugin(name="x", contract="1.4", rows=(), capabilities=capabilities)
    target = Target(backend="x", root=Path())
    target.__dict__["resolution"] = SimpleNamespace(plugin=plugin)
    one = replace(CASES["mechanisms.linear_attention"], function=refuse)
    outcome = run_case(one, target)
    assert (outcome.status, package in outcome.message) == (status, True)


def test_a_refusal_that_does_not_name_the_key_is_shown_with_the_words_that_would_do() -> None:
    vague = ConfigError("model", "only model.path is read", remedy="leave the rest out")
    with pytest.raises(ConformanceFailure) as caught:
        require_refusal_by_name("an override", ("override", "rope"), [vague])
    assert "an override: expected a refusal that names the key (override or rope), got:" in (
        str(caught.value)
    )
    assert "only model.path is read" in str(caught.value)
    named = ConfigError("model.config_overrides", "this engine does not read it")
    require_refusal_by_name("an override", ("override", "rope"), [named])


def test_a_certificate_names_a_capability_that_was_refused_for_want_of_a_package() -> None:
    refused = row(
        "mechanisms.sinks", "refused", group="sinks", message="pip install no-such-distribution"
    )
    run, verdicts = made([row("forward.llama"), refused], declared=["sinks"])
    assert [one.verdict for one in verdicts] == ["conformant"]
    assert ("Declared, and refused here: sinks", refused.outcome.message) in facts(run, "0" * 64)


def test_an_engine_is_asked_only_for_the_model_families_that_it_declares(tmp_path: Path) -> None:
    def target(*families: str) -> Target:
        plugin = EnginePlugin(name="some", contract="1.3", rows=(), families=families)
        made = Target(backend="some", root=tmp_path)
        made.__dict__["resolution"] = SimpleNamespace(plugin=plugin)
        return made

    some, every = target("gpt2", "llama"), target()

    assert some.families == ("llama",)
    assert every.families == ("qwen3", "llama", "mistral", "qwen2", "qwen3_moe", "gemma2")
    told = "model family not declared: qwen2"
    assert [CASES["forward.qwen2"].why_not(one) for one in (some, every)] == [told, None]
    assert [CASES["refusal.moe"].why_not(one) is None for one in (some, every)] == [False, True]
    assert [one.model().name.split("-")[0] for one in (some, every)] == ["llama", "qwen3"]
    assert len(some.models({"family": "llama"}, {"family": "qwen2"})) == 1


@pytest.mark.parametrize(("declared", "told"), [(True, None), (False, "not declared: in_flight")])
def test_a_rollout_is_asked_for_syncs_during_generation_where_its_descriptor_has_them(
    declared: bool, told: str | None
) -> None:
    plugin = EnginePlugin(name="some", contract="1.4", rows=(), in_flight=declared)
    target = Target(backend="some", root=Path(), rollout=True)
    target.__dict__["resolution"] = SimpleNamespace(plugin=plugin)
    assert CASES["rollout.in_flight"].why_not(target) == told
    assert "applies to: rollouts that declare in_flight" in explain_case("rollout.in_flight")


def test_the_quick_tier_runs_some_cases_on_the_smallest_number_of_ranks_alone() -> None:
    once, always, full = (CASES[name] for name in ("distill.top", "train.trajectory", "moe.replay"))

    assert [one.is_quick(1, first=1) for one in (once, always, full)] == [True, True, False]
    assert [one.is_quick(2, first=1) for one in (once, always, full)] == [False, True, False]
    assert once.is_quick(2, first=2)
