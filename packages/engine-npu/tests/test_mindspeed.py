"""MindSpeed's adaptor, which comes before Megatron-core, once and with one layout.

Each test runs in a process of its own, with fake packages.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

ADAPTOR = """
import sys
from mindspeed.patch_utils import MindSpeedPatchesManager, Patch
seen, told = list(sys.argv), []
early = "megatron.core" in sys.modules
MindSpeedPatchesManager.patches_info.update(
    {"torch.compile": Patch(True), "megatron.core.x.y": Patch(APPLIED)}
)
def repatch(args):
    told.append(dict(args))
    MindSpeedPatchesManager.patches_info["megatron.core.x.y"].is_applied = KEPT
"""
PATCHES = """
class Patch:
    def __init__(self, is_applied):
        self.is_applied = is_applied
class MindSpeedPatchesManager:
    patches_info = {}
"""
SETUP = """
import sys
from engine_api import EngineConfig, ModelSource, Parallelism
from engine_api.errors import ConfigError, PluginLoadError
from engine_api.registry import Resolution
from engine_npu.plugin import MEGATRON, MINDSPEED

def make(plugin, row, **config):
    config = EngineConfig(model=ModelSource(path="nowhere"), **config)
    row = plugin.rows[row]
    resolution = Resolution(plugin=plugin, row=row, device="npu", source="test", trace=())
    return resolution.load()(config, resolution=resolution)
"""


@pytest.fixture
def run(tmp_path: Path):
    def start(
        code: str,
        *,
        applied: bool = True,
        kept: bool = True,
        arguments: tuple[str, ...] = ("--config", "x.yaml"),
    ) -> str:
        (tmp_path / "mindspeed").mkdir(exist_ok=True)
        (tmp_path / "mindspeed" / "__init__.py").touch()
        (tmp_path / "mindspeed" / "megatron_adaptor.py").write_text(
            ADAPTOR.replace("APPLIED", str(applied)).replace("KEPT", str(kept))
        )
        (tmp_path / "mindspeed" / "patch_utils.py").write_text(PATCHES)
        (tmp_path / "torch_npu.py").touch()
        script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{SETUP}\n{code}"
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return start


@pytest.mark.slow
def test_the_adaptor_comes_first_and_reads_no_foreign_arguments(run) -> None:
    code = """
make(MEGATRON, 0)
import mindspeed.megatron_adaptor as adaptor
assert not adaptor.early and "megatron.core" in sys.modules
assert adaptor.seen == ["-c"] and sys.argv == ["-c", "--config", "x.yaml"], (adaptor.seen, sys.argv)
"""
    run(code)


def test_the_wrong_order_is_refused(run) -> None:
    code = """
import types
sys.modules["megatron.core"] = types.ModuleType("megatron.core")
try:
    make(MEGATRON, 0)
except PluginLoadError as error:
    cause = error.__cause__
    assert isinstance(cause, PluginLoadError) and "before MindSpeed's adaptor" in cause.what, cause
    assert "fresh process" in cause.remedy
    print("refused")
"""
    assert run(code) == "refused\n"


def test_an_adaptor_that_replaces_nothing_is_refused(run) -> None:
    code = """
try:
    make(MEGATRON, 1)
except PluginLoadError as error:
    print(error.__cause__.what)
    print(error.__cause__.why)
"""
    said = run(code, applied=False)
    assert "replaced nothing of Megatron-core" in said
    assert "0 of 1 replacements are in place" in said


@pytest.mark.slow
def test_settings_that_undo_what_was_replaced_are_refused(run) -> None:
    code = """
try:
    make(MEGATRON, 0).initialize()
except PluginLoadError as error:
    print(error.what)
"""
    assert "replaced nothing of Megatron-core" in run(code, kept=False)


def test_a_mindspeed_that_does_not_load_says_why(run, tmp_path: Path) -> None:
    code = """
import pathlib, mindspeed
pathlib.Path(mindspeed.__file__).with_name("megatron_adaptor.py").write_text("import torch_npu_ops")
try:
    make(MINDSPEED, 0)
except PluginLoadError as error:
    print(error.__cause__.why)
"""
    assert "torch_npu_ops" in run(code)


@pytest.mark.slow
def test_mindspeed_is_told_of_the_layout_once(run) -> None:
    code = """
import mindspeed.megatron_adaptor as adaptor
for plugin, options in ((MINDSPEED, {"fused_moe_permute": True, "sequence_parallel": True}),) * 2:
    engine = make(plugin, 0, parallelism=Parallelism(tp=2, pp=3, ep=4, cp=5), options=options)
    try:
        engine.initialize()
    except ConfigError as error:
        # MindSpeed was configured, and the model's folder does not exist.
        assert error.field == "model.path", error
(told,) = adaptor.told
names = ("tensor_model", "pipeline_model", "expert_model", "context")
layout = [told[f"{name}_parallel_size"] for name in names]
# Context parallelism is engine-megatron's own.
assert layout == [2, 3, 4, 1], layout
assert told["sequence_parallel"]
assert told["use_fused_moe_token_permute_and_unpermute"]
assert told["optimization_level"] == 2
try:
    make(MEGATRON, 0).initialize()
except ConfigError as error:
    print(error.what)
"""
    said = run(code)
    assert "optimization_level" in said
    assert "tensor_model_parallel_size" in said


@pytest.mark.slow
def test_a_balance_loss_that_no_test_has_compared_is_refused(run) -> None:
    code = """
for plugin, row in ((MEGATRON, 0), (MINDSPEED, 0)):
    try:
        make(plugin, row, options={"balance_loss": 0.1})
    except ConfigError as error:
        print(error)
"""
    assert run(code).count("options.balance_loss: expected 0 with MindSpeed, got 0.1") == 2
