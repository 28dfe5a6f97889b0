from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest
import yaml
from layout import ROOT

from engine_api.errors import ConfigError
from engine_api.heartbeat import mark_as_agreed, raised_by_all
from engine_trainer.config import (
    CorrectionSection,
    DPOConfig,
    KTOConfig,
    RewardModelConfig,
    RLConfig,
    SFTConfig,
)
from engine_trainer.config.engine_keys import named_below
from engine_trainer.config.loading import from_tree, load_config, to_plain, to_yaml
from engine_trainer.config.tasks import find_task

BASE = {
    "engine": {"model": {"path": "m"}},
    "data": {"source": "a.jsonl"},
    "run": {"output_dir": "o", "steps": 3},
    "reward": {"name": "math"},
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rl.yaml"
    path.write_text(yaml.safe_dump(BASE))
    return path


def test_yaml_overrides_and_defaults_meet(file):
    config = load_config(
        RLConfig,
        file,
        [
            "engine.optimizer.lr=1e-3",
            "algorithm.clip_high=0.28",
            "data.chat_template_kwargs={a: 1}",
        ],
    )
    assert config.engine.optimizer is not None
    assert config.engine.optimizer.lr == 1e-3
    assert config.algorithm.clip_high == 0.28
    assert config.data.chat_template_kwargs == {"a": 1}
    assert config.engine.memory.max_tokens == 16384


def test_a_quoted_override_is_the_text_in_the_quotes(file):
    for quote in "\"'":
        config = load_config(
            RLConfig, file, [f"data.prompt_template={quote}{{prompt}} Think: step by step.{quote}"]
        )
        assert config.data.prompt_template == "{prompt} Think: step by step."


def test_what_is_printed_reads_back_equal(file):
    config = load_config(RLConfig, file, ["engine.lora.rank=4", "engine.optimizer.betas=[0.8,0.9]"])
    assert from_tree(RLConfig, yaml.safe_load(to_yaml(config))) == config
    assert to_plain(config)["engine"]["optimizer"]["betas"] == [0.8, 0.9]


@pytest.mark.parametrize(
    ("override", "field", "said"),
    [
        ("run.stepss=1", "run.stepss", "did you mean steps"),
        ("engine.memory.max_token=5", "engine.memory.max_token", "did you mean max_tokens"),
        ("egnine.backend=fsdp", "egnine", "did you mean engine"),
        # Engines name their keys without the section of the trainer.
        ("model.init=random", "model", "did you mean engine.model?"),
        ("engine.init=random", "engine.init", "did you mean engine.model.init?"),
        ("run.steps=many", "run.steps", "an integer"),
        ("run.steps=true", "run.steps", "an integer"),
        ("run.steps=1.5", "run.steps", "an integer"),
        ("run.tensorboard=1", "run.tensorboard", "true or false"),
        ("engine.model.path=???", "engine.model.path", "missing"),
        ("engine.model.path=null", "engine.model.path", "text"),
        ("engine.schedule.name=cosin", "engine.schedule.name", "did you mean cosine"),
        ("engine.optimizer.betas=[0.9]", "engine.optimizer.betas", "a list of 2 values"),
        ("algorithm.kl.estimator=k4", "algorithm.kl.estimator", "k1, k2, k3"),
        ("algorithm.prompts_per_step=0", "algorithm.prompts_per_step", "at least 1"),
        ("algorithm.mini_batches=5000", "algorithm.mini_batches", "expected at most the"),
        ("algorithm.clip_low=1.5", "algorithm.clip_low", "in [0, 1], got 1.5"),
        ("algorithm.dual_clip=1.0", "algorithm.dual_clip", "above 1"),
        ("algorithm.advantage=gea", "algorithm.advantage", "did you mean gae"),
        ("algorithm.loss=gsop", "algorithm.loss", "did you mean gspo"),
        ("algorithm.advantage=gae", "algorithm.critic", "needs values"),
        (
            "algorithm={advantage: gae, critic: {epochs: 0}}",
            "algorithm.critic.epochs",
            "at least 1",
        ),
        (
            "algorithm={advantage: gae, critic: {value_clip: 0}}",
            "algorithm.critic.value_clip",
            "above 0",
        ),
        ("algorithm={advantage: gae, critic: {lr: 1}}", "algorithm.critic.lr", "unknown key"),
        ("algorithm.kl={target: 6, coefficient: 0.2}", "algorithm.kl.target", "where: reward"),
        ("algorithm.kl={where: reward, estimator: k3}", "algorithm.kl.estimator", "may push away"),
        ("algorithm.kl={where: reward, estimator: k2}", "algorithm.kl.estimator", "estimator: k1"),
        (
            "algorithm.kl={importance: false, estimator: k1}",
            "algorithm.kl.estimator",
            "expectation is 0",
        ),
        (
            "algorithm.kl={where: reward, importance: false}",
            "algorithm.kl.importance",
            "nothing reads it",
        ),
        ("algorithm.kl={bound: -1}", "algorithm.kl.bound", "above 0"),
        ("algorithm.kl={bound: 5, where: reward}", "algorithm.kl.bound", "nothing reads 5"),
        ("algorithm.kl={bound: null, estimator: k2}", "algorithm.kl.bound", "use k3"),
        (
            "algorithm.aggregation_length=512",
            "algorithm.aggregation_length",
            "seq-mean-token-sum-norm",
        ),
        (
            "algorithm={aggregation: seq-mean-token-sum-norm, aggregation_length: 0}",
            "algorithm.aggregation_length",
            "at least 1",
        ),
        (
            "algorithm.correction.weights=token",
            "algorithm.correction.weights",
            "did you mean weight",
        ),
        ("algorithm.correction.weight=tokens", "algorithm.correction.weight", "did you mean token"),
        (
            "algorithm.correction.reject=geometrical",
            "algorithm.correction.reject",
            "did you mean geometric",
        ),
        ("algorithm.correction.cap=0.5", "algorithm.correction.cap", "at least 1"),
        ("algorithm.correction.low=1.5", "algorithm.correction.low", "in [0, 1], got 1.5"),
        ("algorithm.correction.high=0.9", "algorithm.correction.high", "at least 1"),
        ("algorithm.correction.reject_low=-0.1", "algorithm.correction.reject_low", "in [0, 1]"),
        ("algorithm.correction.reject_low=1.01", "algorithm.correction.reject_low", "in [0, 1]"),
        ("algorithm.correction.reject_high=.nan", "algorithm.correction.reject_high", "at least 1"),
        (
            "algorithm={old_log_probs: rollout, correction: {weight: token}}",
            "algorithm.correction",
            "old_log_probs",
        ),
        (
            "algorithm={old_log_probs: rollout, correction: {reject: token}}",
            "algorithm.correction",
            "old_log_probs",
        ),
        ("rollout.quantization=fp4", "rollout.quantization", "none, fp8"),
        ("rollout.lora=adaptor", "rollout.lora", "did you mean adapter"),
        ("rollout.sleep=1", "rollout.sleep", "true or false"),
        ("rollout.temperature=0", "rollout.temperature", "greedy"),
        ("rollout.n=1", "rollout.n", "at least 2"),
        ("rollout.top_p=1.5", "rollout.top_p", "(0, 1]"),
        ("algorithm.overlong.buffer=9999", "algorithm.overlong.buffer", "rollout.max_new_tokens"),
        ("reward.timeout_s=0", "reward.timeout_s", "above 0"),
        ("eval={source: x, max_problems: -1}", "eval.max_problems", "at least 1"),
        ("data.reasoning_gym={datasets: [], size: 0}", "data.reasoning_gym.size", "at least 1"),
        ("data.reasoning_gym={datasets: [], skip: -1}", "data.reasoning_gym.skip", "at least 0"),
        ("data.columns={messages: a, prompt: b}", "data.columns.messages", "one of the two"),
        ("data.columns={messages: a, response: b}", "data.columns.messages", "one of the two"),
        (
            "data={source: null, split: train, reasoning_gym: {datasets: []}}",
            "data.split",
            "data.source",
        ),
        ("eval={split: test}", "eval.split", "eval.source"),
        ("data.source=[]", "data.source", "give data.source"),
        ("eval={source: x, sets: {a: {split: test}}}", "eval.sets.a.split", "eval.sets.a.source"),
        ("data.prompt_template={prompt}", "data.prompt_template", """'"{prompt}"'"""),
        ("data.prompt_template={prompt} Think.", "data.prompt_template", "quotes"),
        ("data.prompt_template=hello", "data.prompt_template", "{prompt}"),
        ("data.source=null", "data.source", "one of the two"),
        ("data.source=[1]", "data.source", "text or a list"),
        ("run.epochs=1", "run.steps", "one of the two"),
        ("run.steps=0", "run.steps", "expected a finite number above 0, got 0"),
        ("run.steps=0", "run.steps", "engine-train eval"),
        ("run.steps=-2", "run.steps", "expected a finite number above 0, got -2"),
        ("run={steps: null, epochs: 0}", "run.epochs", "expected a finite number above 0, got 0.0"),
        (
            "run={steps: null, epochs: .nan}",
            "run.epochs",
            "expected a finite number above 0, got nan",
        ),
        (
            "run={steps: null, epochs: .inf}",
            "run.epochs",
            "expected a finite number above 0, got inf",
        ),
        ("data.max_length=0", "data.max_length", "at least 1"),
        ("data.max_length=-5", "data.max_length", "at least 1"),
        ("eval={source: x, samples: 0}", "eval.samples", "at least 1"),
        (
            "eval={source: x, sets: {a: {source: y, samples: 0}}}",
            "eval.sets.a.samples",
            "at least 1",
        ),
        (
            "eval={source: x, samples: 0, sets: {a: {source: y, samples: 2}}}",
            "eval.samples",
            "at least 1",
        ),
        (
            "data.reasoning_gym={datasets: [], heldout_share: 1.5}",
            "data.reasoning_gym.heldout_share",
            "[0, 1]",
        ),
        (
            "data.reasoning_gym={datasets: [], worked_share: -1}",
            "data.reasoning_gym.worked_share",
            "[0, 1]",
        ),
        ("eval.every=2", "eval.source", "no held-out part"),
        ("eval.sets.a={samples: 2}", "eval.sets.a.source", "no held-out part"),
        ("eval.sets.a={source: x, samples: -1}", "eval.sets.a.samples", "at least 0"),
        (
            "eval={temperature: 0, sets: {a: {source: x, samples: 2}}}",
            "eval.sets.a.samples",
            "greedy",
        ),
        (
            "eval={samples: 2, sets: {a: {source: x, temperature: 0}}}",
            "eval.sets.a.samples",
            "greedy",
        ),
        ("eval.sets={a b: {source: x}}", "eval.sets.a b", "not a name"),
        ("eval.sets.a={sauce: x}", "eval.sets.a.sauce", "source"),
        ("reward={name: a, function: b}", "reward.name", "one of the two"),
        ("reward={name: a, workers: -1}", "reward.workers", "at least 0"),
        ("engine=3", "engine", "a mapping"),
        ("steps", "steps", "key.sub=value"),
        ("run.output_dir=${run.nothing}", "run.output_dir", "cannot be resolved"),
    ],
)
def test_a_wrong_key_or_value_is_named(file, override, field, said):
    with pytest.raises(ConfigError) as caught:
        load_config(RLConfig, file, [override])
    assert caught.value.field == field
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("tree", "field", "said"),
    [
        ({"reward": {"name": "math"}}, "reward", "eval"),
        (
            {"reward": {"name": "math"}, "eval": {"source": "x", "samples": 0}},
            "reward",
            "eval.samples",
        ),
        ({"eval": {"source": "x", "samples": 4}}, "eval.samples", "reward"),
        (
            {
                "reward": {"name": "math"},
                "eval": {"source": "x", "samples": 0, "sets": {"a": {"source": "y"}}},
            },
            "reward",
            "eval.samples",
        ),
    ],
)
def test_what_nothing_reads_in_sft_is_refused(tree, field, said):
    base = {name: part for name, part in BASE.items() if name != "reward"}
    with pytest.raises(ConfigError) as caught:
        from_tree(SFTConfig, base | tree)
    assert caught.value.field == field
    assert said in str(caught.value)


def test_sft_measures_the_loss_alone_or_the_accuracy_too():
    base = {name: part for name, part in BASE.items() if name != "reward"}
    for tree in (
        {"eval": {"source": "x"}},
        {"eval": {"source": "x", "samples": 0}},
        {
            "reward": {"name": "math"},
            "eval": {"source": "x", "samples": 0, "sets": {"a": {"source": "y", "samples": 2}}},
        },
    ):
        from_tree(SFTConfig, base | tree)


def test_an_evaluation_on_generated_problems_needs_some():
    tree = {
        **BASE,
        "data": {"reasoning_gym": {"datasets": [{"name": "chain_sum"}], "heldout_size": 0}},
    }
    from_tree(RLConfig, tree)
    with pytest.raises(ConfigError) as caught:
        from_tree(RLConfig, {**tree, "eval": {}})
    assert caught.value.field == "data.reasoning_gym.heldout_size"
    # With samples 0 the generated problems are left out, and the sets by name are measured.
    from_tree(
        RLConfig, {**tree, "eval": {"samples": 0, "sets": {"a": {"source": "x", "samples": 1}}}}
    )


@pytest.mark.parametrize("key", ["reward", "run.output_dir", "engine.model.path", "data"])
def test_a_mandatory_key_that_is_missing_is_named(key):
    tree = yaml.safe_load(yaml.safe_dump(BASE))
    *above, last = key.split(".")
    holder = tree
    for name in above:
        holder = holder[name]
    del holder[last]
    with pytest.raises(ConfigError) as caught:
        from_tree(RLConfig, tree)
    assert (caught.value.field, caught.value.what) == (key, "missing")


def test_the_critic_is_as_the_policy_where_nothing_else_is_said(file):
    given = [
        "algorithm.advantage=gae",
        "engine.memory.max_tokens=99",
        "engine.options={a: 1}",
        "engine.lora.rank=4",
    ]
    config = load_config(
        RLConfig,
        file,
        [*given, "algorithm.critic={optimizer: {lr: 0.5}, precision: {compute: bfloat16}}"],
    )
    assert config.algorithm.critic is not None
    critic = config.algorithm.critic.engine(config.engine)
    assert (critic.model_type, critic.model.path, critic.memory.max_tokens) == (
        "value_model",
        "m",
        99,
    )
    assert (critic.precision.compute, critic.lora, critic.options) == ("bfloat16", None, {"a": 1})
    assert critic.optimizer is not None
    assert critic.optimizer.lr == 0.5
    other = load_config(
        RLConfig, file, [*given, "algorithm.critic={backend: megatron, model: {path: v}}"]
    ).algorithm.critic
    assert other is not None
    assert other.engine(config.engine).options == {}, "options are of a backend"
    assert other.engine(config.engine).model.path == "v"


def test_one_completion_is_enough_where_no_group_is_compared(file):
    assert (
        load_config(RLConfig, file, ["rollout.n=1", "algorithm.advantage=reinforce_pp"]).rollout.n
        == 1
    )
    with pytest.raises(ConfigError, match="at least 2"):
        load_config(
            RLConfig,
            file,
            [
                "rollout.n=1",
                "algorithm={advantage: reinforce_pp, dynamic_sampling: {enabled: true}}",
            ],
        )


@pytest.mark.slow
def test_every_option_of_the_trainer_has_a_reader():
    """A field that no line reads would be ignored in silence."""
    from engine_trainer.config import algorithm, evaluation, preferences, rl, sections, sft

    source = Path(sections.__file__).parents[1]
    trees = [ast.parse(path.read_text()) for path in source.rglob("*.py")]
    checks = {
        id(node)
        for tree in trees
        for f in ast.walk(tree)
        if isinstance(f, ast.FunctionDef) and f.name == "__post_init__"
        for node in ast.walk(f)
    }
    read = {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and id(node) not in checks
    }
    classes = [
        c
        for module in (algorithm, evaluation, preferences, rl, sections, sft)
        for c in vars(module).values()
        if dataclasses.is_dataclass(c) and c.__module__ == module.__name__
    ]
    assert len(classes) > 15
    # Inherited fields belong to the contract.
    own = [(c.__name__, name) for c in classes for name in c.__annotations__]
    assert not [f"{section}.{name}" for section, name in own if name not in read]


def test_the_rate_is_the_tasks(file):
    """Default to a tenth of the rate for policies already trained, and keep a given rate."""
    plain = {name: BASE[name] for name in ("engine", "data", "run")}
    value = {**plain, "engine": {**plain["engine"], "model_type": "value_model"}}
    decay = {"optimizer": {"weight_decay": 0.1}}
    for cls, tree, rate in (
        (RLConfig, BASE, 1e-6),
        (DPOConfig, plain, 1e-6),
        (SFTConfig, plain, 1e-5),
        (RewardModelConfig, value, 1e-5),
    ):
        assert from_tree(cls, tree).engine.optimizer.lr == rate
        other = {**tree, "engine": {**tree["engine"], **decay}}
        assert from_tree(cls, other).engine.optimizer.lr == rate
        given = {**tree, "engine": {**tree["engine"], "optimizer": {"lr": 3e-4}}}
        assert from_tree(cls, given).engine.optimizer.lr == 3e-4
    critic = load_config(
        RLConfig, file, ["algorithm={advantage: gae, critic: {}}"]
    ).algorithm.critic
    assert critic is not None
    assert (critic.optimizer.lr, critic.value_clip) == (1e-5, 0.5)


@pytest.mark.parametrize(
    ("overrides", "weight"),
    [
        # It is chosen with the rollout, when the run starts.
        ([], "auto"),
        (["rollout.name=local"], "none"),
        (["rollout.name=vllm"], "token"),
        (["rollout.name=sglang"], "token"),
        (["rollout.name=vllm", "algorithm.old_log_probs=rollout"], "none"),
        (["rollout.name=vllm", "algorithm.correction.weight=none"], "none"),
        (["rollout.name=vllm", "algorithm.correction.weight=icepop"], "icepop"),
        (["algorithm.correction.weight=token"], "token"),
        (["rollout.name=vllm", "algorithm.correction.reject=geometric"], "token"),
    ],
)
def test_another_implementations_rollout_is_corrected_by_default(file, overrides, weight):
    config = load_config(RLConfig, file, overrides)
    assert config.algorithm.correction.weight == weight
    # The printed configuration is the one that runs.
    assert from_tree(RLConfig, yaml.safe_load(to_yaml(config))) == config


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        ({"reject": "token"}, (0.5, 2.0)),
        ({"reject": "sequence"}, (0.5, 2.0)),
        ({"reject": "geometric"}, (0.999, 1.001)),
        ({"reject": "geometric", "reject_low": 0.99}, (0.99, 1.001)),
        ({"reject": "sequence", "reject_high": 3.0}, (0.5, 3.0)),
    ],
)
def test_the_bounds_of_rejection_are_those_of_its_ratio(given, bounds):
    assert CorrectionSection(**given).bounds == bounds


def test_a_value_that_the_contract_refuses_is_named_below_engine(file):
    config = load_config(RLConfig, file, ["engine.memory.max_tokens=0"])
    with pytest.raises(ConfigError) as caught:
        config.engine.build(seed=0, total_steps=1)
    assert caught.value.field == "engine.memory.max_tokens"


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ("options", "algorithm.critic.options"),
        ("model.path", "algorithm.critic.model.path"),
        ("engine.parallelism.tp", "algorithm.critic.parallelism.tp"),
        ("rollout.options.url", "rollout.options.url"),
        ("engine", "engine"),
    ],
)
def test_keys_of_an_engine_are_named_below_its_own_section(field, named):
    with pytest.raises(ConfigError) as caught, named_below("algorithm.critic"):
        raise ConfigError(field, "what", why="why", remedy="remedy")
    error = caught.value
    assert (error.field, error.what, error.why, error.remedy) == (named, "what", "why", "remedy")
    assert error.where == f"config {named}"


def test_a_renamed_error_is_still_one_that_all_ranks_raise():
    with pytest.raises(ConfigError) as caught, named_below("algorithm.critic"):
        raise mark_as_agreed(ConfigError("model.path", "a"))
    assert caught.value.field == "algorithm.critic.model.path"
    assert raised_by_all(caught.value)


def test_nulls_of_the_engine_are_filled_from_the_run(file):
    config = load_config(RLConfig, file, ["engine.schedule.name=linear"])
    built = config.engine.build(seed=7, total_steps=30)
    assert (built.seed, built.schedule.total_steps) == (7, 30)
    fixed = load_config(
        RLConfig, file, ["engine.seed=3", "engine.schedule={name: linear, total_steps: 9}"]
    )
    built = fixed.engine.build(seed=7, total_steps=30)
    assert (built.seed, built.schedule.total_steps) == (3, 9)


def test_base_files_are_taken_first_and_relative(tmp_path, file):
    (tmp_path / "sub").mkdir()
    child = tmp_path / "sub" / "child.yaml"
    child.write_text("base: ../rl.yaml\nrun: {steps: 9}\n")
    config = load_config(RLConfig, child, ["run.seed=4"])
    assert (config.run.steps, config.run.output_dir, config.run.seed) == (9, "o", 4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("base: self.yaml", "include each other"),
        ("a: [1", "not valid YAML"),
        ("a:\n\tb: 1", "line 2, column 1: found character '.t' that cannot start any token"),
        ("a: 1\nb: 2\na: 3", "line 3, column 1: found duplicate key a"),
        ("- 1", "not a mapping"),
        ("base: no.yaml", "no such file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, text, said):
    path = tmp_path / "self.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_config(SFTConfig, path)


@pytest.mark.parametrize(
    ("epochs", "samples", "expected"), [(1, 100, 12), (2.5, 100, 31), (0.01, 100, 1)]
)
def test_epochs_count_whole_batches(file, epochs, samples, expected):
    config = load_config(RLConfig, file, ["run.steps=null", f"run.epochs={epochs}"])
    assert (
        config.run.total_steps(samples, 8, key="algorithm.prompts_per_step", data=config.data)
        == expected
    )


@pytest.mark.parametrize(
    ("kind", "task"),
    [(RLConfig, "rl"), (DPOConfig, "dpo"), (KTOConfig, "kto"), (RewardModelConfig, "rm")],
)
def test_a_balance_loss_is_for_sft_alone(kind, task):
    """It would bend the gradient of every other task's own loss."""
    keys = ("engine", "data", "run", *(["reward"] if kind is RLConfig else []))
    tree = {key: dict(BASE[key]) for key in keys}
    if kind is RewardModelConfig:
        tree["engine"]["model_type"] = "value_model"
    tree["engine"]["options"] = {"balance_loss": 0}
    from_tree(kind, tree)
    tree["engine"]["options"] = {"balance_loss": 1e-3}
    with pytest.raises(ConfigError, match=f"expected 0 in {task}, got 0.001") as caught:
        from_tree(kind, tree)
    assert "engine.options.balance_loss: 0" in caught.value.remedy
    sft = {key: dict(tree[key]) for key in ("engine", "data", "run")}
    assert from_tree(SFTConfig, sft).engine.options == {"balance_loss": 1e-3}


def test_a_critic_has_no_balance_loss_either():
    tree = {key: dict(BASE[key]) for key in ("engine", "data", "run", "reward")}
    tree["algorithm"] = {"advantage": "gae", "critic": {"options": {"balance_loss": 1e-3}}}
    with pytest.raises(ConfigError, match="expected 0 in rl") as caught:
        from_tree(RLConfig, tree)
    assert caught.value.field == "algorithm.critic.options.balance_loss"


RECIPES = ROOT / "recipes"


RECIPE_FILES = sorted(p.relative_to(RECIPES).as_posix() for p in RECIPES.glob("*/*.yaml"))


@pytest.mark.parametrize("path", RECIPE_FILES)
def test_every_recipe_loads(path):
    kinds = {"sft": SFTConfig, "rl": RLConfig, "dpo": DPOConfig, "kto": KTOConfig}
    kinds["rm"] = RewardModelConfig
    kind = kinds[find_task(RECIPES / path, [], list(kinds))]
    given = ["engine.model.path=m", "run.output_dir=o"]
    text = (RECIPES / path).read_text() + (RECIPES / "sft" / "chat.yaml").read_text() * (
        "base: chat" in (RECIPES / path).read_text()
    )
    config = load_config(kind, RECIPES / path, given + ["data.source=s"] * ("source: ???" in text))
    config.engine.build(seed=0, total_steps=10)
