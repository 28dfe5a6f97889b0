from __future__ import annotations

import hashlib

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from engine_api.config import ModelSource
from engine_api.errors import ConfigError, RolloutError, UnsupportedCapability
from engine_api.hf_names import pieces_of, saved_buffers
from engine_api.registry import RolloutRegistry
from engine_api.rollout import Rollout, SamplingParams
from engine_trainer.rollouts.decode import name_cache
from engine_trainer.rollouts.sampling import draw, truncate, uniforms

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
CONFIGS = {
    "qwen3": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "llama": LlamaConfig(**{**SIZES, "num_key_value_heads": 4}, tie_word_embeddings=False),
    "mistral_window": MistralConfig(**SIZES, sliding_window=6, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        tie_word_embeddings=False,
    ),
}
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2], [11], [12, 13, 14], [20, 21, 22, 23, 24]]
EOS = 1


def export(model, only=None):
    """Yield tensors as an engine does.

    They have Hugging Face checkpoint names; tied weights come once, and experts one by one.
    """
    memory = dict(model.named_parameters()) | saved_buffers(model)
    for name, pieces in pieces_of(model).items():
        for piece in pieces:
            if only is None or piece.name in only:
                yield piece.name, piece.view(memory[name].data).clone()


@pytest.fixture(scope="module", params=list(CONFIGS))
def served(request, tmp_path_factory):
    return serve(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return serve("qwen3", tmp_path_factory.mktemp("qwen3"))


def serve(name, folder, **kwargs):
    config = CONFIGS[name]
    config.save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    arguments = {"pad_token_id": 0, "eos_token_ids": (EOS,), "batch_size": 64, **kwargs}
    rollout = RolloutRegistry.create(
        name="local", device="cpu", model=ModelSource(path=str(folder)), **arguments
    )
    rollout.update_weights(export(model), 7)
    return model, rollout


def params(**kwargs) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 12, "seed": 1, **kwargs})


@torch.no_grad()
def full_forward(model, prompt, completion, temperature=1.0):
    """Return a completion's log-probs from one forward pass, without a cache or padding."""
    ids = torch.tensor([[*prompt, *completion]])
    log_probs = (
        model(input_ids=ids, use_cache=False).logits[0].double() / temperature
    ).log_softmax(-1)
    return log_probs[len(prompt) - 1 : -1].gather(-1, torch.tensor(completion)[:, None]).squeeze(-1)


def as_rows(completions):
    return [(c.prompt_index, c.tokens, c.finish_reason) for c in completions]


def test_it_is_a_rollout(qwen3):
    assert isinstance(qwen3[1], Rollout)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_log_probs_are_those_of_a_full_forward(served, temperature):
    model, rollout = served
    completions = rollout.generate(PROMPTS, params(n=4, temperature=temperature))
    assert len(completions) == 20
    worst = 0.0
    for c in completions:
        expected = full_forward(model, PROMPTS[c.prompt_index], c.tokens, temperature)
        worst = max(
            worst, float((torch.tensor(c.log_probs, dtype=torch.float64) - expected).abs().max())
        )
    assert worst <= 1e-5 / min(temperature, 1.0)  # logits, rounded to float32, are divided by it


@pytest.mark.parametrize("cut", [{"top_p": 0.6}, {"top_k": 3}, {"top_k": 5, "top_p": 0.5}])
def test_log_probs_are_before_truncation_and_tokens_after_it(qwen3, cut):
    model, rollout = qwen3
    for c in rollout.generate(PROMPTS, params(n=4, temperature=1.3, **cut)):
        prompt = PROMPTS[c.prompt_index]
        expected = full_forward(model, prompt, c.tokens, 1.3)
        torch.testing.assert_close(
            torch.tensor(c.log_probs, dtype=torch.float64), expected, atol=1e-5, rtol=0
        )
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *c.tokens]])).logits[
                0, len(prompt) - 1 : -1
            ]
        left = truncate((logits / 1.3).log_softmax(-1), params(**cut)).isfinite()
        assert bool(left[torch.arange(len(c.tokens)), c.tokens].all())


def test_greedy_is_that_of_generate(served):
    model, rollout = served
    for c in rollout.generate(PROMPTS, params(temperature=0.0)):
        prompt = PROMPTS[c.prompt_index]
        expected = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=0,
        )[0, len(prompt) :]
        assert c.tokens == expected.tolist()
        torch.testing.assert_close(
            torch.tensor(c.log_probs, dtype=torch.float64),
            full_forward(model, prompt, c.tokens),
            atol=1e-5,
            rtol=0,
        )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_batch_that_a_prompt_is_in_changes_nothing(served, temperature):
    _, rollout = served
    n = 1 if temperature == 0 else 3
    together = rollout.generate(PROMPTS, params(n=n, temperature=temperature))
    alone = [
        c
        for prompt in PROMPTS
        for c in rollout.generate([prompt], params(n=n, temperature=temperature))
    ]
    assert [c.tokens for c in together] == [c.tokens for c in alone]
    assert [c.prompt_index for c in together] == [i for i in range(len(PROMPTS)) for _ in range(n)]
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(
            torch.tensor(a.log_probs), torch.tensor(b.log_probs), atol=1e-5, rtol=1e-5
        )


def test_small_batches_and_order_change_nothing(qwen3, tmp_path):
    _, rollout = qwen3
    _, small = serve("qwen3", tmp_path, batch_size=3)
    whole = rollout.generate(PROMPTS, params(n=2))
    assert as_rows(small.generate(PROMPTS, params(n=2))) == as_rows(whole)
    backwards = rollout.generate(PROMPTS[::-1], params(n=2))
    assert [c.tokens for c in backwards] == [
        c.tokens for i in range(4, -1, -1) for c in whole[2 * i : 2 * i + 2]
    ]


def test_the_seed_decides_and_the_global_generator_is_untouched(qwen3):
    _, rollout = qwen3
    before = torch.random.get_rng_state()
    first = rollout.generate(PROMPTS, params(n=4))
    assert as_rows(rollout.generate(PROMPTS, params(n=4))) == as_rows(first)
    assert as_rows(rollout.generate(PROMPTS, params(n=4, seed=2))) != as_rows(first)
    assert torch.equal(before, torch.random.get_rng_state())
    assert len({tuple(c.tokens) for c in first[:4]}) > 1  # the completions of a prompt differ
    # A repeated prompt gets other random numbers the second time. A longer limit only adds tokens
    # at the end.
    twice = rollout.generate([PROMPTS[0], PROMPTS[0]], params(n=4))
    assert [c.tokens for c in twice[:4]] == [c.tokens for c in first[:4]]
    assert [c.tokens for c in twice[4:]] != [c.tokens for c in first[:4]]
    assert as_rows(rollout.generate(PROMPTS, params(seed=None))) != as_rows(
        rollout.generate(PROMPTS, params(seed=None))
    )


def test_building_leaves_the_global_generator_alone(tmp_path):
    CONFIGS["llama"].save_pretrained(tmp_path)
    before = torch.random.get_rng_state()
    RolloutRegistry.create(
        name="local", device="cpu", model=ModelSource(path=str(tmp_path)), pad_token_id=0
    )
    assert torch.equal(before, torch.random.get_rng_state())


def test_stopping(qwen3):
    _, rollout = qwen3
    free = rollout.generate(PROMPTS, params(n=8, temperature=2.0))
    stop = free[0].tokens[2]  # something that does occur
    completions = rollout.generate(PROMPTS, params(n=8, temperature=2.0, stop_token_ids=(stop,)))
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for before, after in zip(free, completions, strict=True):
        ends = [i for i, t in enumerate(before.tokens) if t in (stop, EOS)]
        kept = ends[0] + 1 if ends else 12
        assert after.tokens == before.tokens[:kept]
        assert after.finish_reason == ("stop" if ends else "length")
        assert len(after.log_probs) == len(after.weight_versions) == kept


def test_a_stop_at_the_very_last_token_is_a_stop(qwen3):
    _, rollout = qwen3
    (free,) = rollout.generate([PROMPTS[0]], params(max_new_tokens=3))
    last = free.tokens[-1]
    assert last not in free.tokens[:-1]
    (again,) = rollout.generate([PROMPTS[0]], params(max_new_tokens=3, stop_token_ids=(last,)))
    assert (again.tokens, again.finish_reason) == (free.tokens, "stop")


def test_no_prompts(qwen3):
    assert qwen3[1].generate([], params()) == []


@pytest.mark.parametrize("prompts", [[[]], [[2] * 60]])
def test_prompts_that_do_not_fit_are_refused_by_index(qwen3, prompts):
    with pytest.raises(RolloutError, match="prompt 1"):
        qwen3[1].generate([[2], *prompts], params())


# --- weights ------------------------------------------------------------------------------------


def change(name: str, tensor: torch.Tensor | None):
    """An export with one tensor left out (None), replaced, or added."""

    def apply(model):
        for given, value in export(model):
            if given != name:
                yield given, value
            elif tensor is not None:
                yield given, tensor
        if tensor is not None and name not in {n for n, _ in export(model)}:
            yield name, tensor

    return apply


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (change(NORM, None), f"{NORM}: missing"),
        (change(NORM, torch.ones(7)), rf"{NORM}: expected shape \[32\], got \[7\]"),
        (
            change("model.layers.1.input_layernom.weight", torch.ones(32)),
            "did you mean model.layers.1.input_layernorm",
        ),
        (lambda m: [*export(m), (NORM, torch.ones(32))], "given twice"),
        (
            lambda m: [*export(m), ("lm_head.weight", torch.ones(48, 32))],
            "lm_head.weight: the model has no such",
        ),
    ],
)
def test_an_export_that_does_not_fit_is_refused_until_a_good_one_comes(tmp_path, bad, said):
    model, rollout = serve("qwen3", tmp_path)
    with pytest.raises(RolloutError, match=said):
        rollout.update_weights(iter(bad(model)), 8)
    with pytest.raises(RolloutError, match="the last weight sync failed"):
        rollout.generate(PROMPTS, params())
    assert rollout.weight_version == 7
    rollout.update_weights(export(model), 9)
    assert {v for c in rollout.generate(PROMPTS, params()) for v in c.weight_versions} == {9}


@pytest.mark.parametrize(("taken", "version", "said"), [(1, 8, "missing"), (0, 6, "stale")])
def test_a_bad_export_is_read_to_its_end(tmp_path, taken, version, said):
    model, rollout = serve("qwen3", tmp_path)
    stream = export(model)
    for _ in range(taken):
        next(stream)  # so that the first name is missing
    with pytest.raises(RolloutError, match=said):
        rollout.update_weights(stream, version)
    assert next(stream, None) is None  # other ranks gather along and are not left waiting


def test_new_weights_are_served(tmp_path):
    model, rollout = serve("qwen3", tmp_path)
    old = rollout.generate(PROMPTS, params(temperature=0.0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1
            )
    rollout.update_weights(((n, t.bfloat16() if n == NORM else t) for n, t in export(model)), 8)
    new = rollout.generate(PROMPTS, params(temperature=0.0))
    assert [c.tokens for c in new] != [c.tokens for c in old]
    with torch.no_grad():
        weight = dict(model.named_parameters())[NORM]
        weight.copy_(weight.bfloat16())  # what was sent
    for c in new:
        expected = full_forward(model, PROMPTS[c.prompt_index], c.tokens)
        torch.testing.assert_close(
            torch.tensor(c.log_probs, dtype=torch.float64), expected, atol=1e-5, rtol=0
        )


def test_nothing_is_generated_before_the_first_sync_nor_asleep_nor_closed(tmp_path):
    CONFIGS["qwen3"].save_pretrained(tmp_path)
    rollout = RolloutRegistry.create(
        name="local", device="cpu", model=ModelSource(path=str(tmp_path)), pad_token_id=0
    )
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3"])
    with pytest.raises(RolloutError, match="no weights"):
        rollout.generate(PROMPTS, params())
    rollout.update_weights(export(model), 0)
    expected = as_rows(rollout.generate(PROMPTS, params()))
    rollout.sleep(weights=False)  # caches alone: nothing that lives between two calls
    assert as_rows(rollout.generate(PROMPTS, params())) == expected
    rollout.sleep(kv_cache=False)
    rollout.sleep()
    rollout.wake_up(weights=False)
    with pytest.raises(RolloutError, match="sleeps"):
        rollout.generate(PROMPTS, params())
    with pytest.raises(RolloutError, match="wake_up"):
        rollout.update_weights(export(model), 0)
    rollout.wake_up()
    with pytest.raises(RolloutError, match="woke up"):
        rollout.generate(PROMPTS, params())
    rollout.update_weights(export(model), 0)
    assert as_rows(rollout.generate(PROMPTS, params())) == expected
    rollout.close()
    rollout.close()
    for call in (rollout.wake_up, lambda: rollout.generate(PROMPTS, params())):
        with pytest.raises(RolloutError, match="closed"):
            call()


def test_a_sync_says_what_it_installed(tmp_path):
    model, rollout = serve("qwen3", tmp_path, dtype="bfloat16")
    result = rollout.update_weights(export(model), 9)
    assert (result.version, result.num_quantized, result.audited) == (9, 0, False)
    assert result.num_tensors == len(list(export(model)))
    assert result.num_bytes == 2 * sum(t.numel() for _, t in export(model))
    assert set(result.seconds) == {"install"}
    assert result.seconds["install"] > 0


def test_bfloat16_is_near(tmp_path):
    model, rollout = serve("qwen3", tmp_path, dtype="bfloat16")
    for c in rollout.generate(PROMPTS, params(n=2)):
        expected = full_forward(model, PROMPTS[c.prompt_index], c.tokens)
        assert float((torch.tensor(c.log_probs, dtype=torch.float64) - expected).abs().mean()) < 0.3


@pytest.mark.parametrize("bad", [{"dtype": "float8"}, {"batch_size": 0}])
def test_options_out_of_range(tmp_path, bad):
    with pytest.raises(ConfigError):
        serve("qwen3", tmp_path, **bad)


# --- sampling -----------------------------------------------------------------------------------


def test_draw_is_the_inverse_of_the_distribution_function():
    probabilities = torch.tensor([0.1, 0.0, 0.6, 0.3])
    logits = probabilities.log().expand(6, 4)
    uniform = torch.tensor([0.0, 0.09, 0.11, 0.69, 0.71, 1 - 2**-53], dtype=torch.float64)
    tokens, log_probs = draw(logits, uniform, params())
    assert tokens.tolist() == [0, 0, 2, 2, 3, 3]
    torch.testing.assert_close(log_probs, probabilities.log()[tokens])


def test_draws_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125])
    count = 200_000
    uniform = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens, _ = draw((probabilities.log() * 2).expand(count, 4), uniform, params(temperature=2.0))
    shares = torch.bincount(tokens, minlength=4) / count
    torch.testing.assert_close(shares, probabilities, atol=0.005, rtol=0)


def test_truncation_by_hand():
    log_probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()

    def left(**kwargs) -> list[bool]:
        return truncate(log_probs, params(**kwargs)).isfinite()[0].tolist()

    assert left() == [True] * 4
    assert left(top_k=2) == [True, True, False, False]
    assert left(top_p=0.5) == [True, False, False, False]
    assert left(top_p=0.51) == [True, True, False, False]
    assert left(top_p=0.01) == [True, False, False, False]  # one is always left
    # Of the two remaining tokens the first has 0.625.
    assert left(top_k=2, top_p=0.62) == [True, False, False, False]


def test_uniform_numbers_are_a_function_of_seed_prompt_and_place():
    numbers = uniforms([[1, 2], [3], [1, 2]], params(n=2, max_new_tokens=3))
    assert numbers.shape == (6, 3)
    assert torch.equal(numbers[2:4], uniforms([[3]], params(n=2, max_new_tokens=3)))
    assert not torch.equal(numbers[:2], numbers[4:])
    # written down, so that a resumed run draws the same with a later version
    digest = hashlib.sha256(numbers.numpy().tobytes()).hexdigest()
    assert digest[:16] == "e1ae480d45c471d2"


# --- experts -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    return serve(
        "qwen3_moe", tmp_path_factory.mktemp("recording"), routed_experts=True, batch_size=6
    )


@torch.no_grad()
def routed(model, ids):
    """Return the experts ``[T, L, k]`` that serve a sequence without a cache or padding.

    They are what the routers of an unwrapped model return.
    """
    found = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _module, _given, output: found.append(output))
        for layer in model.model.layers
    ]
    model(input_ids=torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack([indices for _, _, indices in found], dim=1)


def test_recorded_experts_are_those_of_a_full_forward(recording):
    """Prompts are padded, repeated, and dropped from the batch when they end."""
    model, rollout = recording
    completions = rollout.generate(PROMPTS, params(n=3, stop_token_ids=(EOS, 3, 9, 30)))
    assert len({len(c.tokens) for c in completions}) > 1
    for c in completions:
        ids = [*PROMPTS[c.prompt_index], *c.tokens]
        want = routed(model, ids)
        assert c.routed_experts.shape == (len(ids), 2, 2)
        assert c.routed_experts.dtype == torch.int8
        assert torch.equal(c.routed_experts[:-1].long().sort(-1).values, want[:-1].sort(-1).values)
        assert (c.routed_experts[-1] == -1).all()


def test_recording_changes_no_completion(recording, tmp_path):
    _, plain = serve("qwen3_moe", tmp_path, batch_size=6)
    given = [r.generate(PROMPTS, params(n=2)) for r in (recording[1], plain)]
    assert as_rows(given[0]) == as_rows(given[1])
    assert [c.log_probs for c in given[0]] == [c.log_probs for c in given[1]]
    assert all(c.routed_experts is None for c in given[1])


def test_a_model_without_experts_is_refused(tmp_path):
    with pytest.raises(UnsupportedCapability, match="no router of experts was found") as caught:
        serve("qwen3", tmp_path, routed_experts=True)
    assert caught.value.capability == "router_replay"
    assert "routed_experts: off" in caught.value.remedy


class BeforeRenaming:
    def forward(self, input_ids, past_key_values=None, **options):
        """Take the cache as transformers before 5.24 does."""


class SinceRenaming:
    def forward(self, input_ids, cache=None, **options):
        """Take the cache as transformers does since."""


@pytest.mark.parametrize(
    ("kind", "name"), [(BeforeRenaming, "past_key_values"), (SinceRenaming, "cache")]
)
def test_a_cache_has_the_name_that_the_forward_pass_has_for_it(kind, name):
    assert name_cache(kind()) == name
