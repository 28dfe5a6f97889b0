"""A tokenizer, a model folder, and an engine that trains a table of bigram logits."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import yaml
from own_rewards import FUNCTIONS, SLOW, SLOW_IN_C

from engine_api import BaseEngine, Capability, EngineRegistry, ShardSpec, TokenOutputs, Topology
from engine_api.comm import SingleComm
from engine_trainer.config.sections import RewardSection
from engine_trainer.rewards import Scorer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|eos|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>"]


def make_tokenizer(template=TEMPLATE):
    """One token a character, and the special ones."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(c) for c in range(32, 127)] + ["\n"]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *letters])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<|pad|>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        additional_special_tokens=SPECIAL[3:],
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def tokenizer_of():
    """A tokenizer with another template, or none."""
    return make_tokenizer


@pytest.fixture
def model_folder(tmp_path, tokenizer):
    folder = tmp_path / "model"
    tokenizer.save_pretrained(folder)
    config = {
        "model_type": "qwen3",
        "vocab_size": len(tokenizer),
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "intermediate_size": 16,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


CHARACTERS = ["<pad>", "<eos>", "+", "=", "#", " ", *"0123456789"]


@pytest.fixture(scope="session")
def sums_model(tmp_path_factory) -> Path:
    """A folder with a two-layer Qwen3, a tokenizer of sixteen characters, and sums to complete."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    path = tmp_path_factory.mktemp("rl") / "model"
    tokenizer = Tokenizer(
        models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(path)
    config = Qwen3Config(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=8,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(path)
    rows = [
        {"prompt": f"{a}+{b}=", "answer": str((a + b) % 10)} for a in range(10) for b in range(10)
    ]
    random.Random(0).shuffle(rows)
    for name, part in {"train": rows[:80], "test": rows[80:]}.items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return path


class BigramEngine(BaseEngine):
    """``log p(t | t-1)`` from a table [V, V]; Adam; one rank."""

    topology = Topology()

    def _build(self):
        self.comm = SingleComm()
        self.vocab_size = json.loads((Path(self.config.model.path) / "config.json").read_text())[
            "vocab_size"
        ]
        torch.manual_seed(self.config.seed)
        self.table = torch.nn.Parameter(torch.randn(self.vocab_size, self.vocab_size) * 0.01)
        self.optimizer = torch.optim.Adam([self.table], lr=1.0)
        self.table.grad = torch.zeros_like(self.table)
        self.optimizer.step()  # makes the state

    def forward_step(self, batch, *, needs, temperature, coefficients=None):
        previous = batch.input_ids.roll(1)
        logs = (self.table[previous] / temperature).log_softmax(-1)
        first = torch.zeros(batch.num_tokens, dtype=torch.bool)
        first[batch.cu_seqlens[:-1]] = True
        own = logs.gather(-1, batch.input_ids[:, None])[:, 0].masked_fill(first, 0.0)
        return TokenOutputs(
            log_probs=own, entropy=-(logs.exp() * logs).sum(-1).masked_fill(first, 0.0)
        )

    def _clip_gradients(self, max_norm):
        return float(torch.nn.utils.clip_grad_norm_([self.table], max_norm or float("inf")))

    def _apply_optimizer(self, lr):
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()

    def _zero_grad(self):
        self.table.grad = None

    def state_shards(self):
        state = self.optimizer.state[self.table]
        whole = {
            "model.table": self.table.data,
            "optim.table.exp_avg": state["exp_avg"],
            "optim.table.exp_avg_sq": state["exp_avg_sq"],
            "optim.table.step": state["step"],
        }
        return {key: (value, ShardSpec.whole(value.shape)) for key, value in whole.items()}

    def get_per_tensor_param(self, **_):
        yield "table", self.table.data

    def get_per_tensor_param_shard(self, **_):
        yield "table", self.table.data, ShardSpec.whole(self.table.shape)

    def save_hf(self, directory, **_):
        Path(directory).mkdir(exist_ok=True)
        torch.save(self.table.data, Path(directory) / "table.pt")

    def _state_layout(self, entries):
        return {key: (spec, value.dtype) for key, (value, spec) in self.state_shards().items()}

    def _install_state(self, tensors):
        for key, (value, _) in self.state_shards().items():
            value.copy_(tensors[key])

    def _rng_state(self):
        return {}

    def _set_rng_state(self, state):
        pass

    def _release(self):
        pass


@pytest.fixture
def bigram_class():
    return BigramEngine


@pytest.fixture
def bigram():
    """The backend's name, registered for the test."""
    EngineRegistry.register(
        backend="bigram", device="cpu", capabilities=frozenset({Capability.SAVE_HF})
    )(BigramEngine)
    yield "bigram"
    EngineRegistry.unregister("bigram")


@pytest.fixture
def sft_file(tmp_path, model_folder, bigram):
    """A runnable SFT configuration: abc… → def…, over the bigram engine."""
    rows = [
        {"prompt": f"say {'abc'[i % 3]}", "response": "abcabc"[i % 3 : i % 3 + 4]}
        for i in range(20)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    config = {
        "engine": {
            "model": {"path": str(model_folder)},
            "backend": bigram,
            "optimizer": {"lr": 0.1},
        },
        "data": {"source": str(tmp_path / "rows.jsonl")},
        "batch_size": 8,
        "run": {
            "output_dir": str(tmp_path / "run"),
            "steps": 6,
            "progress": False,
            "tensorboard": False,
            "report": False,
        },
    }
    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture
def own(tmp_path):
    """Makes a scorer of one of the functions in ``own_rewards``."""
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "beside.py").write_text("SEVEN = 7")
    (tmp_path / "slow_module.py").write_text(SLOW)
    (tmp_path / "slow_module_in_c.py").write_text(SLOW_IN_C)
    scorers = []

    def make(name, **settings) -> Scorer:
        if settings.get("workers") == 0:  # nothing keeps the time there
            settings = {"timeout_s": None} | settings
        scorers.append(
            Scorer.from_section(RewardSection(function=f"{tmp_path}/mine.py:{name}", **settings))
        )
        return scorers[-1]

    yield make
    for scorer in scorers:
        scorer.close()
