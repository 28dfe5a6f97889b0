"""Tests of the registry.

Plug-ins may be absent, broken, conflicting, for a different contract, or for absent devices.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

import pytest

from engine_api.config import EngineConfig, ModelSource
from engine_api.errors import (
    ConfigError,
    ContractMismatch,
    PluginConflict,
    PluginLoadError,
    PluginNotFound,
    PluginUnavailable,
)
from engine_api.plugin import contract_problem
from engine_api.registry import EngineRegistry, Registry, RolloutRegistry

GOOD = """
from engine_api.plugin import CONTRACT, EnginePlugin, ProbeResult, Row

def probe(device):
    if device == "cuda":
        return ProbeResult(ok=False, reason="no driver", remedy="install one")
    return ProbeResult(ok=True)

PLUGIN = EnginePlugin(name="acme", contract=CONTRACT, probe=probe, rows=(
    Row(backends=("acme", "acme2"), devices=("cuda", "cpu"), target="{module}_engine:Engine"),
    Row(backends=("acme-gpu",), devices=("cuda",), target="{module}_engine:Engine"),
))
"""
ENGINE = "class Engine:\n    pass\n"


@pytest.fixture
def registry():
    return Registry("test.engines", "engine")


@pytest.fixture
def acme(add_distribution):
    add_distribution(
        "acme",
        {"acme": "acme_plugin:PLUGIN"},
        {"acme_plugin": GOOD.format(module="acme"), "acme_engine": ENGINE},
    )


@pytest.mark.usefixtures("acme")
class TestResolution:
    def test_auto_falls_to_the_cpu_and_says_so(self, registry, caplog):
        with caplog.at_level(logging.INFO, logger="engine_api"):
            found = registry.resolve(backend="acme")
        assert (found.device, found.row.target) == ("cpu", "acme_engine:Engine")
        assert [(c.device, c.accepted) for c in found.trace] == [("cuda", False), ("cpu", True)]
        assert caplog.messages == [f"device auto -> cpu by {found.source}, not cuda: no driver"]

    def test_an_explicit_device_is_never_replaced(self, registry):
        with pytest.raises(PluginUnavailable, match="no driver") as caught:
            registry.resolve(backend="acme", device="cuda")
        assert caught.value.remedy == "install one"
        assert len(caught.value.trace) == 1

    def test_a_device_without_a_row_is_named(self, registry):
        with pytest.raises(PluginUnavailable, match="never replaced") as caught:
            registry.resolve(backend="acme", device="npu")
        assert "cpu, cuda" in caught.value.remedy

    def test_auto_without_any_usable_device_shows_the_trace(self, registry):
        with pytest.raises(PluginUnavailable, match=r"cuda by acme==1\.0"):
            registry.resolve(backend="acme-gpu")

    def test_the_class_is_imported_when_it_is_loaded(self, registry):
        found = registry.resolve(backend="acme2", device="cpu")
        assert registry.load(found).__name__ == "Engine"

    def test_unknown_names_get_their_near_matches(self, registry):
        with pytest.raises(PluginNotFound, match="did you mean acme"):
            registry.resolve(backend="acne")

    def test_known_but_absent_gets_the_install_line(self, registry):
        with pytest.raises(PluginNotFound, match="pip install 'engine-fsdp'"):
            registry.resolve(backend="fsdp2")

    def test_a_model_type_that_is_not_served(self, registry):
        with pytest.raises(PluginNotFound, match="it serves: language_model"):
            registry.resolve(backend="acme", model_type="value_model")


def test_two_distributions_with_one_row_are_both_named(registry, acme, add_distribution):
    other = GOOD.format(module="acme")
    add_distribution("emca", {"emca": "emca_plugin:PLUGIN"}, {"emca_plugin": other})
    with pytest.raises(PluginConflict, match=r"(?s)acme==1.0.*emca==1.0"):
        registry.resolve(backend="acme")


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
@pytest.mark.parametrize("probes", ["ok=True", "ok=False"])
def test_whether_two_plugins_conflict_does_not_depend_on_what_their_probes_say(
    registry, acme, add_distribution, device, probes
):
    other = GOOD.format(module="acme").replace("ok=True", probes).replace("ok=False", probes)
    add_distribution("emca", {"emca": "emca_plugin:PLUGIN"}, {"emca_plugin": other})
    with pytest.raises(
        PluginConflict, match=r"(?s)language_model by acme on c.*acme==1.0.*emca==1.0"
    ):
        registry.resolve(backend="acme", device=device)
    assert len(registry.conflicts()) == 5


def test_a_conflict_on_another_device_than_the_one_asked_for_is_none(
    registry, acme, add_distribution
):
    other = GOOD.format(module="acme").replace('devices=("cuda", "cpu")', 'devices=("cuda",)')
    add_distribution("emca", {"emca": "emca_plugin:PLUGIN"}, {"emca_plugin": other})
    assert registry.resolve(backend="acme", device="cpu").source.startswith("acme==1.0")
    with pytest.raises(PluginConflict, match="on cuda"):
        registry.resolve(backend="acme")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("rows=None", "rows: expected a tuple of one or more Row, got None"),
        ("rows=(None,)", "rows: expected"),
        ("rows=()", "rows: expected"),
        ("name=3", "name: expected a name, got 3"),
        ("contract=None", "contract: expected a version, MAJOR.MINOR, got None"),
        ("capabilities=None", "capabilities: expected a frozenset of Capability, got None"),
        ("options=5", 'options: expected "module:Class" or None, got 5'),
        ("exporter='nowhere'", "exporter: expected"),
        ("families='llama'", "families: expected a tuple of names, got 'llama'"),
        ("one_layout=None", "one_layout: expected True or False, got None"),
        ("variants=None", "variants: expected a tuple of Variant, got None"),
        ("variants=({'fast': True},)", "variants: expected a tuple of Variant"),
        (
            "variants=(engine_api.Variant(options={}),)",
            r"variants\[0\].options: expected one or more values by name, got {}",
        ),
        (
            "variants=(engine_api.Variant(options={'fast': True}, parallelism={'tp': '2'}),)",
            r"variants\[0\].parallelism: expected sizes of 1 or more by field of Parallelism",
        ),
        ("probe=None", "probe: expected a function of a device's name, got None"),
        (
            "rows=(dataclasses.replace(PLUGIN.rows[0], backends=None),)",
            r"rows\[0\].backends: expected a tuple",
        ),
        (
            "rows=(dataclasses.replace(PLUGIN.rows[0], devices='cpu'),)",
            r"rows\[0\].devices: expected a tuple",
        ),
        ("rows=(dataclasses.replace(PLUGIN.rows[0], target='x'),)", r"rows\[0\].target: expected"),
        (
            "rows=(dataclasses.replace(PLUGIN.rows[0], model_types=(1,)),)",
            r"rows\[0\].model_types: expected",
        ),
        (
            "rows=(PLUGIN.rows[0], PLUGIN.rows[0])",
            r"rows\[0\] and rows\[1\] both serve language_model by acme on cuda",
        ),
    ],
)
def test_a_descriptor_with_a_wrong_field_is_refused_by_the_fields_name(
    registry, acme, add_distribution, change, said
):
    text = (
        GOOD.format(module="bent")
        + f"import dataclasses, engine_api\nPLUGIN = dataclasses.replace(PLUGIN, {change})\n"
    )
    add_distribution("bent", {"bent": "bent_plugin:PLUGIN"}, {"bent_plugin": text})
    assert registry.resolve(backend="acme").source.startswith("acme==1.0")
    with pytest.raises(ContractMismatch, match=said):
        registry.resolve(backend="bent")


@pytest.mark.parametrize(
    "answer", ["None", "True", "ProbeResult(ok=None)", "ProbeResult(ok=True, reason=None)"]
)
def test_a_probe_that_returns_no_answer_says_no(registry, add_distribution, answer):
    text = GOOD.format(module="mute").replace("return ProbeResult(ok=True)", f"return {answer}")
    add_distribution("mute", {"mute": "mute_plugin:PLUGIN"}, {"mute_plugin": text})
    with pytest.raises(PluginUnavailable, match=r"its probe failed: .*expected"):
        registry.resolve(backend="acme", device="cpu")


def test_an_import_that_takes_long_is_named_in_the_log(registry, add_distribution, monkeypatch):
    said, texts = threading.Event(), []

    class Log:
        def warning(self, text, *values):
            texts.append(text % values)
            said.set()

        info = warning

    monkeypatch.setattr("engine_api.discovery.LONG_S", 0.1)
    monkeypatch.setattr("engine_api.discovery.log", Log())
    monkeypatch.setattr("builtins.SAID", said, raising=False)
    slow = "import builtins\nbuiltins.SAID.wait()\n" + GOOD.format(module="slow")
    add_distribution("slow", {"slow": "slow_plugin:PLUGIN"}, {"slow_plugin": slow})
    assert registry.resolve(backend="acme").device == "cpu"
    assert texts == [
        (
            "the import of slow==1.0 (slow_plugin:PLUGIN) has not returned for 0.1 s; "
            "a descriptor must import nothing heavy"
        )
    ]


def test_an_unknown_name_comes_with_the_plugins_that_are_broken(registry, add_distribution):
    add_distribution(
        "rotten", {"rotten": "rotten_plugin:PLUGIN"}, {"rotten_plugin": "import no_such_module"}
    )
    with pytest.raises(PluginNotFound, match=r"(?s)broken, and not asked: rotten==1\.0.*doctor"):
        registry.resolve(backend="bogus")


def test_registering_with_a_wrong_field_is_refused(registry):
    with pytest.raises(PluginLoadError, match="name: expected"):
        registry.register(backend=None, device="cpu")(type("Engine", (), {}))


def test_a_broken_descriptor_is_kept_with_its_cause_and_breaks_nobody(
    registry, acme, add_distribution
):
    add_distribution(
        "rotten", {"rotten": "rotten_plugin:PLUGIN"}, {"rotten_plugin": "import no_such_module"}
    )
    assert registry.resolve(backend="acme").device == "cpu"
    with pytest.raises(PluginLoadError, match="no_such_module") as caught:
        registry.resolve(backend="rotten")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert "rotten==1.0" in caught.value.where


def test_a_broken_known_distribution_is_not_called_absent(registry, add_distribution):
    add_distribution("engine-fsdp", {"fsdp": "broken_fsdp:PLUGIN"}, {"broken_fsdp": "1 / 0"})
    with pytest.raises(PluginLoadError, match="ZeroDivisionError"):
        registry.resolve(backend="fsdp2")


def test_a_class_that_does_not_import_is_reported_with_its_cause(registry, add_distribution):
    modules = {
        "half_plugin": GOOD.format(module="half"),
        "half_engine": "raise RuntimeError('boom')",
    }
    add_distribution("half", {"half": "half_plugin:PLUGIN"}, modules)
    with pytest.raises(PluginLoadError, match="boom") as caught:
        registry.load(registry.resolve(backend="acme"))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_entry_point_that_is_no_plugin(registry, add_distribution):
    add_distribution("odd", {"odd": "odd_plugin:PLUGIN"}, {"odd_plugin": "PLUGIN = 3"})
    with pytest.raises(ContractMismatch, match="names a int"):
        registry.resolve(backend="odd")


def test_another_contract_is_refused_by_any_of_its_backends(registry, add_distribution):
    text = GOOD.format(module="new").replace("contract=CONTRACT", "contract='1.99'")
    add_distribution("new", {"new": "new_plugin:PLUGIN"}, {"new_plugin": text})
    with pytest.raises(ContractMismatch, match=r"1\.99, newer"):
        registry.resolve(backend="acme2")


def test_a_probe_that_raises_says_no(registry, add_distribution):
    text = GOOD.format(module="bad").replace(
        "return ProbeResult(ok=True)", "raise OSError('fell over')"
    )
    add_distribution("bad", {"bad": "bad_plugin:PLUGIN"}, {"bad_plugin": text})
    with pytest.raises(PluginUnavailable, match="fell over"):
        registry.resolve(backend="acme")


@pytest.mark.parametrize(
    ("contract", "problem"),
    [
        ("1.2", None),
        ("1.0", None),
        ("1.3", "newer"),
        ("2.0", "serves 1.2"),
        ("0.9", "serves"),
        ("one", "MAJOR.MINOR"),
    ],
)
def test_contract_versions(contract, problem):
    found = contract_problem(contract, ours="1.2")
    assert (found is None) if problem is None else (problem in found)


def test_registering_in_process(registry):
    @registry.register(backend="mine", device="cpu")
    class Mine:
        pass

    found = registry.resolve(backend="mine")
    assert registry.load(found) is Mine
    assert "in process" in found.source
    registry.unregister("mine")
    with pytest.raises(PluginNotFound):
        registry.resolve(backend="mine")


def test_options_of_an_engine_whose_descriptor_names_none_are_refused():
    made = []

    def build(config, *, resolution):
        made.append((config.options, resolution.plugin.name))

    config = EngineConfig(model=ModelSource(path="."), options={"fast": True})
    try:
        EngineRegistry.register(backend="plain", device="cpu")(build)
        with pytest.raises(ConfigError, match=r"options: expected none, got \{'fast': True\}"):
            EngineRegistry.create(backend="plain", config=config)
        EngineRegistry.create(backend="plain", config=replace(config, options={}))
        EngineRegistry.register(backend="plain", device="cpu", options="acme:Options")(build)
        EngineRegistry.create(backend="plain", config=config)
    finally:
        EngineRegistry.unregister("plain")
    assert made == [({}, "plain"), ({"fast": True}, "plain")]


def test_entry_points_are_read_again_after_refresh(registry, add_distribution):
    assert registry.found() == []
    add_distribution(
        "late", {"late": "late_plugin:PLUGIN"}, {"late_plugin": GOOD.format(module="late")}
    )
    assert registry.found() == []
    registry.refresh()
    assert [f.distribution for f in registry.found()] == ["late"]


def test_a_notebook_cell_that_runs_again_replaces_its_row(registry):
    for _ in range(2):
        registry.register(backend="cell", device="cpu")(type("Cell", (), {}))
    assert registry.resolve(backend="cell").device == "cpu"


def test_rollouts_are_not_offered_as_engines(registry):
    with pytest.raises(PluginNotFound) as caught:
        registry.resolve(backend="nonesuch")
    assert "vllm" not in caught.value.remedy


class Wire:
    def __init__(self, *, resolution, timeout_s):
        self.made = resolution.device, timeout_s


def test_a_rollouts_wire_is_made_where_its_descriptor_names_one():
    RolloutRegistry.register(backend="near", device="cpu")(type("Near", (), {}))
    RolloutRegistry.register(backend="far", device="cpu", wire=f"{__name__}:Wire")(
        type("Far", (), {})
    )
    try:
        assert RolloutRegistry.create_wire(name="near", device="cpu", timeout_s=3.0) is None
        wire = RolloutRegistry.create_wire(name="far", device="cpu", timeout_s=3.0)
        assert wire.made == ("cpu", 3.0)
        RolloutRegistry.register(backend="far", device="cpu", wire=f"{__name__}:Nothing")(
            type("Far", (), {})
        )
        with pytest.raises(PluginLoadError, match="Nothing"):
            RolloutRegistry.create_wire(name="far", device="cpu", timeout_s=3.0)
    finally:
        RolloutRegistry.unregister("near")
        RolloutRegistry.unregister("far")
