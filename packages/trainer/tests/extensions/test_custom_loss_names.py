"""Names of losses and advantages: built in, of a package, a file's function, and wrong ones."""

from __future__ import annotations

import pickle

import pytest
from installed_packages import forget, install

from engine_api.errors import ConfigError, PluginConflict, PluginLoadError
from engine_trainer.algorithms.losses import PolicyLoss
from engine_trainer.config.algorithm import AlgorithmSection
from engine_trainer.config.explain import installed_names
from engine_trainer.extensions.built_in import ADVANTAGES, LOSSES
from engine_trainer.extensions.functions import absolute_target

LOSS = """
from engine_trainer.algorithms import LossOutput, policy_loss

@policy_loss(needs=("ref_log_probs",), only_advantages=True)
def mine(tokens, *, scale: float = 1.0, mode: str = "plain"):
    return LossOutput(loss=-scale * (tokens.weight * tokens.advantages * tokens.log_probs).sum())

def undecorated(tokens, clip_high, **options):
    return LossOutput(loss=(tokens.weight * tokens.log_probs).sum())

def needs_one(tokens, *, temperature: float):
    return LossOutput(loss=(tokens.weight * tokens.log_probs).sum())

def of_nothing():
    return None

def by_name_alone(*, tokens):
    return None

number = 3
"""


@pytest.fixture(autouse=True)
def as_before():
    yield
    forget()


@pytest.fixture
def package(tmp_path, monkeypatch):
    entries = {
        "engine_trainer.losses": {"mine": "lossy:mine", "number": "lossy:number"},
        "engine_trainer.advantages": {"broken": "not_there:anything"},
    }
    monkeypatch.syspath_prepend(install(tmp_path / "site", "lossy", entries, LOSS))
    forget()


@pytest.fixture
def file(tmp_path, monkeypatch):
    (tmp_path / "losses.py").write_text(LOSS)
    monkeypatch.chdir(tmp_path)
    return "losses.py"


def test_a_name_of_a_package(package):
    section = AlgorithmSection(loss="mine", loss_options={"scale": 2})
    assert section.loss_traits.only_advantages
    assert section.reads_reference  # without a KL
    assert not AlgorithmSection().reads_reference
    assert PolicyLoss(kind="mine").only_advantages
    listed = installed_names()["algorithm.loss"]
    assert listed == sorted(listed)
    # Beside these stand those of packages that happen to be installed, as the examples' are.
    assert {*LOSSES.built_in, "mine", "number"} <= {*listed}
    assert "broken" in installed_names()["algorithm.advantage"]


def test_a_function_of_a_file(file):
    section = AlgorithmSection(loss=f"{file}:undecorated", clip_high=0.5, loss_options={"any": 1})
    assert not section.loss_traits.only_advantages
    # A process with a different working directory finds it, too.
    target = absolute_target(section.loss)
    assert target.startswith("/")
    assert absolute_target("ppo") == "ppo"
    assert absolute_target("package.module:loss") == "package.module:loss"
    loss = pickle.loads(pickle.dumps(PolicyLoss(kind=target)))
    assert loss.kind == target


@pytest.mark.parametrize(
    ("options", "field", "said"),
    [
        ({"scael": 1.0}, "loss_options.scael", "did you mean scale"),
        ({"scale": "much"}, "loss_options.scale", "expected a number, got the text 'much'"),
        ({"mode": 3}, "loss_options.mode", "expected text"),
        ({"clip_low": 0.1}, "loss_options.clip_low", "algorithm.clip_low"),
    ],
)
def test_options_are_checked_against_the_signature(package, options, field, said):
    with pytest.raises(ConfigError, match=said) as caught:
        AlgorithmSection(loss="mine", loss_options=options)
    assert caught.value.field == f"algorithm.{field}"


def test_options_of_a_built_in_loss_and_advantage(file):
    AlgorithmSection(advantage="grpo", advantage_options={"eps": 1e-4})
    with pytest.raises(ConfigError, match="no such option"):
        AlgorithmSection(loss_options={"tau": 1.0})
    with pytest.raises(ConfigError, match="its options are eps"):
        AlgorithmSection(advantage_options={"epsilon_of_it": 1.0})
    with pytest.raises(ConfigError, match=r"missing, and .*needs_one has no default"):
        AlgorithmSection(loss=f"{file}:needs_one")
    with pytest.raises(ConfigError, match=r"nothing reads 0\.5 with loss") as caught:
        AlgorithmSection(loss=f"{file}:mine", clip_high=0.5)
    assert caught.value.field == "algorithm.clip_high"


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("pop", ConfigError, "did you mean ppo"),
        ("zzz", ConfigError, "cispo, .*gspo, gspo_token, mine, .*ppo"),
        ("losses.py", ConfigError, "expected file.py:function.*\n.*\n.*losses.py:my_loss"),
        ("losses.py:", ConfigError, "path/to/file.py:name"),
        ("absent.py:mine", ConfigError, "there is no file"),
        ("losses.py:mien", ConfigError, "did you mean mine"),
        ("losses.py:of_nothing", ConfigError, "takes no positional argument.*\n.*def of_nothing"),
        ("losses.py:by_name_alone", ConfigError, "takes no positional argument"),
        ("broken.py:mine", ConfigError, "cannot be imported\n.*ZeroDivisionError"),
        ("number", PluginLoadError, r"lossy==1.0 \(lossy:number\): loss 'number' is no function"),
    ],
)
def test_a_wrong_name_says_what_to_do(package, file, tmp_path, name, error, said):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(error, match=said) as caught:
        AlgorithmSection(loss=name)
    assert caught.value.remedy
    if error is ConfigError:
        assert caught.value.field == "algorithm.loss"


def test_a_package_that_cannot_be_imported(package):
    with pytest.raises(PluginLoadError, match=r"lossy==1.0 \(not_there:anything\)") as caught:
        AlgorithmSection(advantage="broken")
    assert "No module named 'not_there'" in caught.value.why


def test_names_that_collide_name_both_packages(package, tmp_path, monkeypatch):
    entries = {"engine_trainer.losses": {"mine": "other:mine", "ppo": "other:mine"}}
    monkeypatch.syspath_prepend(install(tmp_path / "more", "other", entries, LOSS))
    forget()
    with pytest.raises(PluginConflict, match=r"lossy==1.0 \(lossy:mine\) and other==1.0 \(other"):
        AlgorithmSection(loss="mine")
    with pytest.raises(PluginConflict, match=r"engine-trainer \(built in\) and other==1.0"):
        AlgorithmSection(loss="ppo")


def test_the_keys_that_a_built_in_function_reads_are_its_parameters():
    """Check the table that is read without torch against the functions."""
    for registry, keys in (
        (LOSSES, ("clip_low", "clip_high", "dual_clip")),
        (ADVANTAGES, ("gamma", "lam")),
    ):
        for name, built_in in registry.built_in.items():
            parameters = registry.parameters(name)
            assert set(built_in.reads) == set(keys) & set(parameters), name
            registry.missing_options(name, [])
