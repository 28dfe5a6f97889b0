"""On-policy distillation: its gradient, its sources of log-probs, and what it refuses."""

from __future__ import annotations

import itertools
import json
import math
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import pytest
import torch
from rl_runs import configure, rows_of, start, tensors_of, tree
from rollout_rows import rows_of_step
from waiting import DEADLINE_S

from engine_api.batch import Batch
from engine_api.capabilities import Capability
from engine_api.distillation import Teaching
from engine_api.errors import ConfigError, UnsupportedCapability
from engine_api.registry import EngineRegistry
from engine_api.results import TokenOutputs
from engine_trainer.algorithms.losses import PolicyLoss
from engine_trainer.config import TeacherSection
from engine_trainer.data import Example, TeacherPrompts
from engine_trainer.errors import DataError
from engine_trainer.rl import served_teacher
from engine_trainer.rl.partition import TrainingDocument
from engine_trainer.rl.served_teacher import TeacherClient, TeacherError
from engine_trainer.rl.teacher import check_same_vocabulary

TOKENS = 16  # of the tokenizer
NEAR = 1e-5  # nats: float32 against float64 in a model of two layers


# --- the gradient, by enumeration ---------------------------------------------------------------

VOCABULARY, LENGTH = 3, 3
SEQUENCES = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
PREFIXES = [p for n in range(LENGTH) for p in itertools.product(range(VOCABULARY), repeat=n)]


def paths_of(table: torch.Tensor) -> torch.Tensor:
    """The log-probs ``[sequences, LENGTH]`` of a table of logits ``[prefixes, VOCABULARY]``."""
    log = table.log_softmax(-1)
    return torch.stack(
        [torch.stack([log[PREFIXES.index(s[:t]), s[t]] for t in range(LENGTH)]) for s in SEQUENCES]
    )


def expected_loss(
    loss: PolicyLoss, policy, sampler, teacher, advantage: float = 0.0, divergence=None
):
    """The mean of the loss over all sequences that the sampler draws, with its weight."""
    probability = paths_of(sampler).sum(-1).exp()
    old, taught = paths_of(sampler), paths_of(teacher)
    lead = torch.zeros(len(SEQUENCES), 1, dtype=torch.float64)

    def flat(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([lead, x], 1).reshape(-1)

    weight = probability[:, None].expand(-1, LENGTH)
    reward = torch.tensor([float(s[0] == 0) for s in SEQUENCES], dtype=torch.float64)
    rewards = (advantage * reward)[:, None].expand(-1, LENGTH)
    size = len(SEQUENCES) * (LENGTH + 1)
    batch = Batch(
        input_ids=torch.zeros(size, dtype=torch.int64),
        cu_seqlens=torch.arange(0, size + 1, LENGTH + 1),
        fields={
            "loss_weight": flat(weight),
            "old_log_probs": flat(old),
            "teacher_log_probs": flat(taught),
            "advantages": flat(rewards),
            # Of the policy loss alone, where a loss is corrected.
            "correction": torch.full((size,), 0.5, dtype=torch.float64),
        },
    )
    outputs = TokenOutputs(log_probs=flat(paths_of(policy)), divergence=divergence)
    return loss(outputs, batch).loss


def exact_kl(policy, sampler, teacher) -> torch.Tensor:
    """KL(policy ‖ teacher) over the whole vocabulary, at the prefixes that the sampler visits."""
    log, taught = policy.log_softmax(-1), teacher.log_softmax(-1)
    kl = (log.exp() * (log - taught)).sum(-1)
    drawn = sampler.log_softmax(-1)
    visits = [
        math.exp(sum(float(drawn[PREFIXES.index(p[:t]), p[t]]) for t in range(len(p))))
        for p in PREFIXES
    ]
    return (torch.tensor(visits, dtype=torch.float64) * kl).sum()


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("reward_weight", [0.0, 0.7])
def test_the_expected_gradient_is_that_of_the_kl_over_the_vocabulary(on_policy, reward_weight):
    """Sampled tokens suffice for the right gradient, on and off policy, far from the teacher."""
    draw = torch.Generator().manual_seed(1)
    shape = (len(PREFIXES), VOCABULARY)
    policy, drift, teacher = (
        1.5 * torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(3)
    )
    sampler = policy if on_policy else policy + 0.3 * drift
    policy.requires_grad_()
    distills = PolicyLoss(
        teacher_coef=2.0,
        policy_coef=reward_weight,
        on_policy=on_policy,
        clip_high=9.0,
        clip_low=1.0,
    )
    rewards = PolicyLoss(on_policy=on_policy, clip_high=9.0, clip_low=1.0)
    loss = expected_loss(distills, policy, sampler.detach(), teacher, 1.0)
    (got,) = torch.autograd.grad(loss, policy)
    wanted = 2.0 * exact_kl(policy, sampler.detach(), teacher)
    if reward_weight:
        wanted = wanted + reward_weight * expected_loss(
            rewards, policy, sampler.detach(), teacher, 1.0
        )
    (want,) = torch.autograd.grad(wanted, policy)
    assert want.abs().max() > 0.05
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("reward_weight", [0.0, 0.7])
def test_the_gradient_over_the_vocabulary_is_exact(reward_weight):
    """Differentiate each token's KL given the sampled prefixes, on and off policy.

    No ratio multiplies it.
    """
    draw = torch.Generator().manual_seed(1)
    shape = (len(PREFIXES), VOCABULARY)
    policy, sampler, teacher = (
        1.5 * torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(3)
    )
    policy.requires_grad_()
    loss = PolicyLoss(
        teacher_coef=2.0,
        teaching=Teaching(vocabulary=VOCABULARY),
        policy_coef=reward_weight,
        clip_high=9.0,
        clip_low=1.0,
        corrected=True,
    )
    assert loss.needs == ("log_probs", "divergence")
    log = policy.log_softmax(-1)
    kl = (log.exp() * (log - teacher.log_softmax(-1))).sum(-1)
    at = [[0.0, *(kl[PREFIXES.index(s[:t])] for t in range(LENGTH))] for s in SEQUENCES]
    divergence = torch.stack([torch.as_tensor(one) for row in at for one in row])
    got = expected_loss(loss, policy, sampler, teacher, 1.0, divergence=divergence)
    wanted = 2.0 * exact_kl(policy, sampler, teacher)
    if reward_weight:
        alone = replace(loss, teacher_coef=0.0, teaching=None)
        wanted = wanted + expected_loss(alone, policy, sampler, teacher, 1.0)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    (one,) = torch.autograd.grad(got, policy, retain_graph=True)
    (other,) = torch.autograd.grad(wanted, policy)
    assert other.abs().max() > 0.05
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_without_weight_nothing_of_the_teacher_is_read():
    """NaN in a prompt is harmless, and without rewards so are advantages."""
    log_probs = torch.tensor([0.0, math.nan, -2.0], requires_grad=True)
    batch = Batch(
        input_ids=torch.tensor([1, 2, 3]),
        cu_seqlens=torch.tensor([0, 3]),
        fields={
            "loss_weight": torch.tensor([0.0, 0.0, 1.0]),
            "teacher_log_probs": torch.tensor([7.0, 7.0, -0.5]),
            "advantages": torch.zeros(3),
        },
    )
    loss = PolicyLoss(teacher_coef=1.0, policy_coef=0.0, on_policy=True)
    assert not loss.only_advantages
    result = loss(TokenOutputs(log_probs=log_probs), batch)
    result.loss.backward()
    assert log_probs.grad.tolist() == [0.0, 0.0, -1.5]
    assert float(result.metrics["teacher_kl"]) == -1.5


# --- a step, against the oracle -----------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher_model(sums_model, tmp_path_factory):
    """A teacher of another size with the student's tokenizer."""
    import shutil

    from transformers import Qwen3Config, Qwen3ForCausalLM

    path = shutil.copytree(sums_model, tmp_path_factory.mktemp("teacher") / "model")
    values = json.loads((path / "config.json").read_text())
    values.pop("layer_types", None)
    # Rows of padding, beyond the tokenizer's tokens.
    more = {"hidden_size": 48, "num_hidden_layers": 1, "vocab_size": TOKENS + 4}
    config = Qwen3Config(**values | more)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def train(monkeypatch):
    """Run a configuration, and return the packed batches of all updates."""
    pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
    from engine_trainer.placement.spmd import SpmdEngines
    from engine_trainer.rl.loop import train_rl

    shards: list[Batch] = []
    original = SpmdEngines.train

    def note(self, batches, loss, **settings):
        shards.extend(batches)
        return original(self, batches, loss, **settings)

    monkeypatch.setattr(SpmdEngines, "train", note)

    def run(config) -> list[Batch]:
        shards.clear()
        train_rl(config)
        return list(shards)

    return run


SGD = {"name": "torch.optim.SGD", "lr": 0.1, "weight_decay": 0.0, "clip_norm": None}


def sections(sums_model, teacher: dict, **run) -> dict:
    engine = {"model": {"path": str(sums_model)}, "device": "cpu", "optimizer": SGD}
    return {
        "engine": engine,
        "rollout": {"n": 2, "max_new_tokens": 4},
        "algorithm": {"prompts_per_step": 8, "teacher": teacher},
        "run": {"steps": 1, "rollouts": "all"} | run,
    }


def oracle(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)


def log_probs_of(model, tokens: list[int]) -> torch.Tensor:
    """The log-prob of each token but the first, in float64."""
    ids = torch.tensor([tokens])
    log = model(input_ids=ids).logits[0].log_softmax(-1)
    return log[:-1].gather(-1, ids[0, 1:, None])[:, 0]


def check_update(folder, sums_model, student, loss: torch.Tensor, near: float = 1e-5) -> dict:
    """Compare gradient and update of the first step with those of ``loss``, weight by weight."""
    loss.backward()
    (figures,) = (row for row in rows_of(folder) if row["step"] == 1)
    gradients = {name: p.grad for name, p in student.named_parameters()}
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    assert figures["train/grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    before, after = tensors_of(sums_model), tensors_of(folder / "hf")
    for name, gradient in gradients.items():
        if name not in after:
            continue  # tied
        moved = (before[name].double() - after[name].double()) / SGD["lr"]
        bound = 1e-4 * float(gradient.norm()) + near
        assert float((moved - gradient).abs().max()) <= bound, name
    return figures


@pytest.mark.slow
def test_a_step_of_sampled_tokens_is_the_oracles(train, sums_model, teacher_model, tmp_path):
    """Teacher's log-probs per token, and the update per weight, in float64 with transformers."""
    teacher = {"engine": {"model": {"path": str(teacher_model)}}, "kl": "sampled"}
    config = configure(sums_model, tmp_path, **sections(sums_model, teacher))
    train(config)
    rows = rows_of_step(tmp_path, 1)
    student, teacher = oracle(sums_model), oracle(teacher_model)
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for row in rows:
        begin = len(row["prompt_tokens"]) - 1
        tokens = row["prompt_tokens"] + row["tokens"]
        own = log_probs_of(student, tokens)[begin:]
        with torch.no_grad():
            taught = log_probs_of(teacher, tokens)[begin:]
        assert row["teacher_log_probs"] == pytest.approx(taught.tolist(), abs=NEAR)
        assert row["old_log_probs"] == pytest.approx(own.tolist(), abs=NEAR)
        assert not any(row["advantages"])
        total = total + ((own - taught).detach() * own).sum()
        count += len(row["tokens"])
    figures = check_update(tmp_path, sums_model, student, total / count)
    kl = sum(sum(r["old_log_probs"]) - sum(r["teacher_log_probs"]) for r in rows) / count
    assert figures["train/teacher_kl"] == pytest.approx(kl, abs=NEAR)


def rows_of_tokens(model, row: dict, temperature: float = 1.0) -> torch.Tensor:
    """The log-probs over the tokenizer's tokens of which each token of a completion is drawn."""
    tokens = row["prompt_tokens"] + row["tokens"]
    logits = model(input_ids=torch.tensor([tokens])).logits[0, :, :TOKENS] / temperature
    return logits.log_softmax(-1)[len(row["prompt_tokens"]) - 1 : -1]


def divergence_of(log_p: torch.Tensor, log_q: torch.Tensor, kind: str) -> torch.Tensor:
    """The divergence of rows of log-probs, in nats."""
    if kind == "reverse_kl":
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    if kind == "forward_kl":
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    log_m = (0.5 * log_p.exp() + 0.5 * log_q.exp()).log()
    to_middle = divergence_of(log_p, log_m, "reverse_kl") + divergence_of(
        log_q, log_m, "reverse_kl"
    )
    return 0.5 * to_middle


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
def test_a_step_over_the_vocabulary_is_the_oracles(
    train, sums_model, teacher_model, tmp_path, kind
):
    """Use a temperature, a teacher of another size and padding, and chunks of logits."""
    teacher = {"engine": {"model": {"path": str(teacher_model)}}, "divergence": kind}
    values = sections(sums_model, teacher)
    values["engine"] |= {"memory": {"max_tokens": 24, "logit_chunk": 5}}
    values["rollout"] |= {"temperature": 0.7}
    train(configure(sums_model, tmp_path, **values))
    student, taught = oracle(sums_model), oracle(teacher_model)
    found = []
    for row in rows_of_step(tmp_path, 1):
        with torch.no_grad():
            log_q = rows_of_tokens(taught, row, 0.7)
        found.append(divergence_of(rows_of_tokens(student, row, 0.7), log_q, kind))
        assert row["teacher_log_probs"] is None
    mean = torch.cat(found).mean()
    figures = check_update(tmp_path, sums_model, student, mean)
    assert figures["train/teacher_kl"] == pytest.approx(mean.item(), abs=NEAR)
    assert mean.item() > 0.01


def test_packing_and_mini_batches_change_nothing(train, sums_model, teacher_model, tmp_path):
    teacher = {"engine": {"model": {"path": str(teacher_model)}}}
    whole = sections(sums_model, teacher)
    train(configure(sums_model, tmp_path / "whole", **whole))
    cut = sections(sums_model, teacher | {"engine": teacher["engine"] | {"memory": {}}})
    cut["engine"] = cut["engine"] | {"memory": {"max_tokens": 16}}
    train(configure(sums_model, tmp_path / "cut", **cut))
    one, two = tensors_of(tmp_path / "whole" / "hf"), tensors_of(tmp_path / "cut" / "hf")
    before = tensors_of(sums_model)
    assert any(not torch.equal(one[name], before[name]) for name in one)
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-5, atol=1e-6)


def test_a_teacher_that_is_the_student_teaches_nothing(train, sums_model, tmp_path):
    """The first ratio is exactly 1 and the first KL exactly 0, since both are one path."""
    teacher = {"engine": {"model": {"path": str(sums_model)}}}
    train(configure(sums_model, tmp_path, **sections(sums_model, teacher)))
    (figures,) = (row for row in rows_of(tmp_path) if row["step"] == 1)
    assert (figures["train/teacher_kl"], figures["train/grad_norm"]) == (0.0, 0.0)


def test_the_policy_teaches_itself_with_the_answer_in_the_prompt(train, sums_model, tmp_path):
    """Its prompt has another length, so that its documents lie elsewhere than the student's."""
    teacher = {"prompt_template": "#{answer}#{prompt}", "kl": "sampled"}
    (shard,) = train(configure(sums_model, tmp_path, **sections(sums_model, teacher)))
    model = oracle(sums_model)
    rows = rows_of_step(tmp_path, 1)
    tokenizer = {c: i for i, c in enumerate(["<pad>", "<eos>", *"+=# 0123456789"])}
    for row in rows:
        shown = f"#{row['answer']}#{row['question']}"
        assert row["teacher_prompt_tokens"] == [tokenizer[c] for c in shown]
        with torch.no_grad():
            tokens = row["teacher_prompt_tokens"] + row["tokens"]
            taught = log_probs_of(model, tokens)[len(shown) - 1 :]
        assert row["teacher_log_probs"] == pytest.approx(taught.tolist(), abs=NEAR)
    documents = {
        tuple(shard.input_ids[a:b].tolist()): shard["teacher_log_probs"][a:b].tolist()
        for a, b in pairwise(shard.boundaries)
    }
    for row in rows:
        given = documents[(*row["prompt_tokens"], *row["tokens"])]
        assert given[len(row["prompt_tokens"]) :] == row["teacher_log_probs"]


def test_the_policy_teaches_itself_as_it_was_before_the_updates(train, sums_model, tmp_path):
    """It sees the answer, in longer documents, and the first update moves no teacher."""
    values = sections(sums_model, {"prompt_template": "#{answer}#{prompt}"})
    values["algorithm"] |= {"mini_batches": 2}
    train(configure(sums_model, tmp_path, **values))
    student, taught = oracle(sums_model), oracle(sums_model)
    rows = rows_of_step(tmp_path, 1)
    halves = [[r for r in rows if r["group"] * 2 // 8 == half] for half in range(2)]

    def divergences(half: int) -> torch.Tensor:
        found = []
        for row in halves[half]:
            shown = row | {"prompt_tokens": row["teacher_prompt_tokens"]}
            with torch.no_grad():
                log_q = rows_of_tokens(taught, shown)
            found.append(divergence_of(rows_of_tokens(student, row), log_q, "reverse_kl"))
        return torch.cat(found)

    first = divergences(0)
    first.mean().backward()
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.sub_(parameter.grad, alpha=SGD["lr"])
        second = divergences(1)
    (figures,) = (row for row in rows_of(tmp_path) if row["step"] == 1)
    want = float(torch.cat([first.detach(), second]).mean())
    assert figures["train/teacher_kl"] == pytest.approx(want, abs=NEAR)


def test_a_step_of_which_nothing_is_left_asks_no_teacher(train, sums_model, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingDocument, "counted", property(lambda document: 0))
    values = sections(sums_model, {"prompt_template": "#{answer}#{prompt}"})
    assert train(configure(sums_model, tmp_path, **values)) == []
    (figures,) = (row for row in rows_of(tmp_path) if row["step"] == 1)
    assert figures["train/updates"] == 0


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.nightly
@pytest.mark.parametrize("kl", ["sampled", "full"])
def test_two_ranks_learn_what_one_does(train, sums_model, teacher_model, tmp_path, kl):
    """The teacher's documents are longer, and fall on other ranks than the student's."""
    template = "#{answer}#{answer}#{answer}#{prompt}"
    teacher = {"engine": {"model": {"path": str(teacher_model)}}, "prompt_template": template}
    values = sections(sums_model, teacher | {"kl": kl}, steps=2)
    train(configure(sums_model, tmp_path / "1", **values))
    process = start(tmp_path, tree(sums_model, tmp_path / "2", **values), 2)
    text, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, text
    for a, b in zip(rows_of_step(tmp_path / "1", 1), rows_of_step(tmp_path / "2", 1), strict=True):
        assert a["tokens"] == b["tokens"]
        if kl == "sampled":
            assert b["teacher_log_probs"] == pytest.approx(a["teacher_log_probs"], abs=NEAR)
    one, two = tensors_of(tmp_path / "1" / "hf"), tensors_of(tmp_path / "2" / "hf")
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-5, atol=1e-5)


# --- a served teacher ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(teacher_model):
    """A server of the teacher that answers as vLLM's completions do, and the requests to it.

    ``answer["…"]`` changes it: ``status`` for the next requests, ``without`` log-probs, ``shift``
    of the texts of tokens.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(teacher_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(teacher_model)
    answer: dict = {"requests": [], "status": []}

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *words):
            del words

        def do_GET(self):
            self.reply({"data": [{"id": "teacher"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer["requests"].append((self.path, body, self.headers.get("Authorization")))
            if answer["status"]:
                self.send_error(answer["status"].pop())
                return
            ids = body["prompt"]
            with torch.no_grad():
                log = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            rows: list = [None]
            for place, token in enumerate(ids[1:]):
                text = tokenizer.decode([token + answer.get("shift", 0)])
                best = log[place].topk(min(body["prompt_logprobs"], answer.get("most", 99)))
                shown = dict.fromkeys([*best.indices.tolist(), token])
                rows.append(
                    {
                        f"{answer.get('prefix', '')}{one}": {
                            "logprob": float(log[place, one]),
                            "decoded_token": text,
                        }
                        for one in shown
                    }
                )
            if answer.get("without"):
                rows = []
            self.reply({"choices": [{"prompt_logprobs": rows}]})

        def reply(self, value):
            text = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    answer["url"] = f"http://127.0.0.1:{server.server_port}/v1"
    yield answer
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_served_teacher_is_the_engine(
    train, served, sums_model, teacher_model, tmp_path, monkeypatch
):
    """Also where the server is busy for a moment."""
    monkeypatch.setattr(served_teacher, "PAUSE_S", 0.01)
    by_engine = {"engine": {"model": {"path": str(teacher_model)}}, "kl": "sampled"}
    train(configure(sums_model, tmp_path / "engine", **sections(sums_model, by_engine)))
    served["status"] += [503, 429]
    by_url = {"url": served["url"], "api_key": "secret-key", "kl": "sampled"}
    train(configure(sums_model, tmp_path / "url", **sections(sums_model, by_url)))
    one, two = rows_of_step(tmp_path / "engine", 1), rows_of_step(tmp_path / "url", 1)
    for a, b in zip(one, two, strict=True):
        assert a["tokens"] == b["tokens"]
        assert b["teacher_log_probs"] == pytest.approx(a["teacher_log_probs"], abs=NEAR)
    path, body, key = served["requests"][-1]
    assert (path, body["model"], body["prompt_logprobs"]) == ("/v1/completions", "teacher", 1)
    assert key == "Bearer secret-key"
    assert "secret-key" not in (tmp_path / "url" / "config.yaml").read_text()


def test_a_step_over_the_best_tokens_is_the_oracles(
    train, served, sums_model, teacher_model, tmp_path
):
    """Compare a server's best tokens, none of which is padding, and all others as one class."""
    train(
        configure(sums_model, tmp_path, **sections(sums_model, {"url": served["url"], "top_k": 5}))
    )
    assert served["requests"][-1][1]["prompt_logprobs"] == 5
    student, taught = oracle(sums_model), oracle(teacher_model)
    found, padded = [], 0
    for row in rows_of_step(tmp_path, 1):
        log_p = rows_of_tokens(student, row)
        tokens = row["prompt_tokens"] + row["tokens"]
        with torch.no_grad():
            logits = taught(input_ids=torch.tensor([tokens])).logits[0]
        log_q = logits.log_softmax(-1)[len(row["prompt_tokens"]) - 1 : -1]
        for p, q in zip(log_p, log_q, strict=True):
            best = [one for one in q.topk(5).indices.tolist() if one < TOKENS]
            padded += len(best) < 5
            rest = [one for one in range(TOKENS) if one not in best]
            classes = torch.cat([p[best], p[rest].logsumexp(0)[None]])
            wanted = torch.cat([q[best], torch.log1p(-q[best].exp().sum())[None]])
            found.append(divergence_of(classes, wanted, "reverse_kl"))
    assert padded
    mean = torch.stack(found).mean()
    figures = check_update(tmp_path, sums_model, student, mean)
    assert figures["train/teacher_kl"] == pytest.approx(mean.item(), abs=NEAR)


@pytest.fixture
def refusal(sums_model, tmp_path):
    """Return the error of a run with a teacher, which comes before any step."""
    pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
    from engine_trainer.rl.loop import train_rl

    def error_of(kind, teacher: dict, **more) -> str:
        values = sections(sums_model, teacher)
        values = values | {name: values.get(name, {}) | part for name, part in more.items()}
        with pytest.raises(kind) as raised:
            train_rl(configure(sums_model, tmp_path / "refused", **values))
        assert not (tmp_path / "refused" / "metrics.jsonl").exists()
        return str(raised.value)

    return error_of


def test_a_server_that_cannot_teach_is_refused(refusal, served, monkeypatch):
    monkeypatch.setattr(served_teacher, "PAUSE_S", 0.0)
    monkeypatch.setitem(served, "without", True)
    assert "vLLM, whose completions have prompt_logprobs" in refusal(
        TeacherError, {"url": served["url"]}
    )
    monkeypatch.setitem(served, "without", False)
    monkeypatch.setitem(served, "shift", 1)
    text = refusal(ConfigError, {"url": served["url"]})
    assert "with the tokenizer of the policy" in text
    assert "token 2 is '+' here and '=' at" in text
    monkeypatch.setitem(served, "shift", 0)
    with monkeypatch.context() as patch:
        patch.setitem(served, "prefix", "token_id:")
        text = refusal(TeacherError, {"url": served["url"]})
    assert "does not return the log-probs of a prompt" in text
    assert "has {'token_id:" in text
    monkeypatch.setitem(served, "most", 3)
    with pytest.raises(TeacherError, match=r"(?s)returns 4 tokens, expected 5.*--max-logprobs 5"):
        TeacherClient(TeacherSection(url=served["url"], top_k=5)).best_tokens([[2, 3]], TOKENS)
    text = refusal(TeacherError, {"url": "http://user:word@127.0.0.1:1/v1"})
    assert "does not answer" in text
    assert "word" not in text
    assert "http://" in refusal(ConfigError, {"url": "localhost:8000"})
    text = refusal(ConfigError, {"url": served["url"]}, rollout={"temperature": 0.7})
    assert "expected 1 with algorithm.teacher.url" in text


def test_an_engine_without_distributions_is_refused(refusal, monkeypatch, teacher_model):
    from engine_fsdp.plugin import PLUGIN

    less = PLUGIN.capabilities - {Capability.DISTILLATION}
    monkeypatch.setattr("engine_fsdp.plugin.PLUGIN", replace(PLUGIN, capabilities=less))
    EngineRegistry.refresh()
    try:
        text = refusal(UnsupportedCapability, {"engine": {"model": {"path": str(teacher_model)}}})
    finally:
        monkeypatch.undo()
        EngineRegistry.refresh()
    assert "distillation" in text
    assert "algorithm.teacher.kl: sampled" in text


def test_what_a_teachers_engine_refuses_is_named_by_its_own_key(refusal, teacher_model):
    model = {"path": str(teacher_model)}
    text = refusal(ConfigError, {"engine": {"model": model, "options": {"foo": 1}}})
    assert text.startswith("config algorithm.teacher.engine.options.foo: unknown key")
    text = refusal(ConfigError, {"engine": {"model": model | {"attention": "foo"}}})
    assert text.startswith("config algorithm.teacher.engine.model.attention: unknown kernel")


def test_a_teacher_with_another_tokenizer_is_refused(refusal, model_folder, sums_model):
    text = refusal(ConfigError, {"engine": {"model": {"path": str(model_folder)}}})
    assert "expected the tokenizer of the policy" in text
    assert "'<pad>' has id 0 in" in text
    assert "and no id in" in text
    check_same_vocabulary({"a": 0}, {"a": 0}, "one", "two")
    with pytest.raises(ConfigError, match="1 tokens differ"):
        check_same_vocabulary({"a": 0, "b": 1}, {"a": 0}, "one", "two")


@pytest.mark.parametrize(
    ("teacher", "more", "text"),
    [
        ({}, {}, "expected an engine, a url or a prompt_template"),
        ({"url": "http://h", "engine": {"model": {"path": "m"}}}, {}, "one of the two, got both"),
        ({"prompt_template": "no"}, {}, r"expected a text with {prompt}"),
        ({"prompt_template": "{prompt}?", "api_key": "k"}, {}, "expected null without a url"),
        ({"url": "http://h", "coefficient": 0.0}, {}, "expected a number above 0"),
        ({"url": "http://h", "kl": "full"}, {}, "expected top_k or sampled with a url"),
        ({"prompt_template": "{prompt}?", "kl": "top_k"}, {}, "expected full or sampled without"),
        (
            {"url": "http://h", "kl": "sampled", "divergence": "jsd"},
            {},
            "expected reverse_kl with kl: sampled",
        ),
        ({"url": "http://h", "beta": 1.0}, {}, "expected a number in"),
        ({"url": "http://h", "top_k": 0}, {}, "expected a number of at least 1"),
        ({"url": "http://h"}, {"dynamic_sampling": {"enabled": True}}, "reward_weight 0"),
        ({"url": "http://h"}, {"advantage": "gae", "critic": {}}, "reward_weight 0"),
        ({"url": "http://h"}, {"overlong": {"buffer": 2}}, "reward_weight 0"),
        (
            {"url": "http://h"},
            {"kl": {"coefficient": 0.1, "where": "reward"}},
            "reward_weight 0",
        ),
    ],
)
def test_a_teacher_that_makes_no_sense_is_refused(tmp_path, teacher, more, text):
    with pytest.raises(ConfigError, match=text):
        configure(tmp_path, tmp_path, algorithm={"prompts_per_step": 8, "teacher": teacher} | more)


def test_shared_prefixes_are_for_sampled_tokens_alone(sums_model, tmp_path):
    """Refuse them too where the policy teaches itself, with documents that begin differently."""
    for teacher, kl in (({"url": "http://h"}, "top_k"), ({"prompt_template": "{prompt}?"}, "full")):
        values = sections(sums_model, teacher)
        values["engine"] |= {"memory": {"share_prefixes": True}}
        with pytest.raises(ConfigError, match=f"expected false with algorithm.teacher.kl: {kl}"):
            configure(sums_model, tmp_path, **values)
        values["algorithm"]["teacher"] |= {"kl": "sampled"}
        configure(sums_model, tmp_path, **values)


def test_one_completion_of_a_prompt_is_enough_without_rewards(tmp_path):
    teacher = {"url": "http://h"}
    rollout = {"n": 1, "max_new_tokens": 4}
    algorithm = {"prompts_per_step": 8, "teacher": teacher}
    assert configure(tmp_path, tmp_path, rollout=rollout, algorithm=algorithm).rollout.n == 1
    mixed = algorithm | {"teacher": teacher | {"reward_weight": 1.0}}
    with pytest.raises(ConfigError, match=r"rollout.n"):
        configure(tmp_path, tmp_path, rollout=rollout, algorithm=mixed)


def test_what_a_row_lacks_for_the_teachers_prompt_is_named(tokenizer):
    from engine_trainer.config import DataSection
    from engine_trainer.data import ChatTokenizer

    chat = ChatTokenizer(tokenizer, DataSection(source="x"))
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]
    prompts = TeacherPrompts(template="{prompt} ({answer}: {response})", limit=9)
    example = Example(messages=turns, answer="{prompt}", file="f", number=3)
    (made,) = prompts.add([_prompt()], [example], chat)
    assert (
        chat.tokenizer.decode(made.teacher_tokens) == "<|bos|><|user|>q ({prompt}: r)<|assistant|>"
    )
    with pytest.raises(DataError, match=r"f:7(?s:.)*expected at most 9"):
        prompts.check([made])
    with pytest.raises(DataError, match=r"f:3(?s:.)*shows {answer}, but the row has none"):
        prompts.add([_prompt()], [Example(messages=turns, file="f", number=3)], chat)
    with pytest.raises(DataError, match=r"shows {response}"):
        prompts.add([_prompt()], [Example(messages=turns[:1], answer="1")], chat)


def _prompt():
    from engine_trainer.data import Prompt

    return Prompt(tokens=[1], rendered="", text="", answer=None, file="f", number=7)
