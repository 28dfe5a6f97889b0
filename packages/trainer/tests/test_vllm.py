"""The loop with vLLM, in the environment of ``nox -s vllm``.

On Ray it gives the bits of torchrun, and vLLM loads its export.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from ray_runs import local_cluster, on_ray, reshaped, result_of, start, tree
from waiting import DEADLINE_S

ray = pytest.importorskip("ray", reason="the extra ray")
versions = pytest.importorskip("rollout_fp8.versions", reason="rollout-fp8")
# Not imported here: vLLM belongs into the processes that generate.
NEEDS_VLLM = pytest.mark.skipif(
    versions.installed(versions.tested("vllm", "cpu")) is None, reason="vLLM's CPU build"
)
pytestmark = [
    NEEDS_VLLM,
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

from ray.util import placement_group, remove_placement_group  # noqa: E402 - behind importorskip
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: E402
from vllm_parts import executor_of  # noqa: E402

from engine_trainer.rl.on_ray import train_on_ray  # noqa: E402

ALGORITHMS = {
    "grpo": {},
    "ppo": {
        "advantage": "gae",
        "critic": {"optimizer": {"lr": 0.01}, "epochs": 4},
        "epochs": 2,
        "mini_batches": 2,
    },
}
# This is the smallest head that vLLM's CPU kernels support.
HEAD = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def model(sums_model, tmp_path_factory) -> Path:
    """Return the model of the sums, with heads that vLLM serves."""
    return reshaped(sums_model, tmp_path_factory.mktemp("served") / "model", **HEAD)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with local_cluster(4):
        yield


def sections(model: Path, algorithm: str) -> dict:
    return {
        "rollout": {"name": "vllm", "options": {"kv_cache_bytes": 1 << 26}},
        "run": {"steps": 12, "save_every": 0},
        "algorithm": ALGORITHMS[algorithm],
        "eval": {"source": str(model / "test.jsonl"), "every": 0, "samples": 2},
    }


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    """Return the folder of a run on two ranks of torchrun, without Ray.

    Each is made once.
    """

    @cache
    def run(algorithm: str) -> Path:
        out = tmp_path_factory.mktemp(algorithm) / "out"
        process = start(
            tree(model, out, **sections(model, algorithm)), out.parent / "run.yaml", ranks=2
        )
        text, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, text
        return out

    return run


@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("ppo", marks=pytest.mark.nightly)])
def test_beside_two_engine_ranks_it_learns_and_gives_the_bits_of_torchrun(
    model, tmp_path, alone, algorithm
):
    train_on_ray(on_ray(model, tmp_path / "out", **sections(model, algorithm)))
    found = result_of(tmp_path / "out")
    assert found == result_of(alone(algorithm))
    rows = found[1]
    assert rows[0]["eval/reward"] < 0.2
    assert rows[-1]["eval/reward"] > 0.8
    # vLLM's log-probs of its tokens equal the engine's.
    apart = [row["mismatch/max"] for row in rows if "mismatch/max" in row]
    assert 0 < max(apart) < 1e-4


def test_ranks_that_share_documents_have_a_replica_each(model, tmp_path, alone):
    """Check that every rank has a replica.

    vLLM makes process groups in all ranks or hangs, and a rank without a replica would idle while
    the other ranks generate.
    """
    shared = {**sections(model, "grpo"), "engine": {"parallelism": {"ulysses": 2}}}
    process = start(tree(model, tmp_path / "out", **shared), tmp_path / "run.yaml", ranks=2)
    text, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, text
    rows, others = (result_of(folder)[1] for folder in (tmp_path / "out", alone("grpo")))
    # The weights and the number of replicas are still the same.
    assert rows[1]["train/reward"] == others[1]["train/reward"]
    assert rows[-1]["eval/reward"] > 0.8


@pytest.mark.parametrize("name", [pytest.param("vllm", marks=pytest.mark.nightly), "vllm-server"])
def test_apart_from_the_engine_it_gives_the_same_bits(model, tmp_path, alone, name):
    """Use as many replicas as engine ranks.

    Each gets the prompts of the replica that is colocated with that rank.
    """
    given = sections(model, "grpo")
    apart = {**given, "rollout": {**given["rollout"], "name": name}, "ray": {"rollouts": 2}}
    train_on_ray(on_ray(model, tmp_path / "out", **apart))
    assert result_of(tmp_path / "out") == result_of(alone("grpo"))
    row = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["sync/wire_bytes"] >= row["sync/bytes"] > 0
    assert row["sync/audited"] == 1


@pytest.mark.parametrize("cache", ["recompute", pytest.param("keep", marks=pytest.mark.nightly)])
def test_it_learns_while_weights_are_updated_in_the_middle_of_completions(
    model, tmp_path, caplog, cache
):
    caplog.set_level("INFO", logger="engine_trainer")
    given = {
        "rollout": {
            "name": "vllm",
            "options": {"kv_cache_bytes": 1 << 26, "kv_cache_in_flight": cache},
            # A replica has work for longer than a step takes.
            "max_new_tokens": 48,
            "batch_size": 8,
        },
        "overlap": {"mode": "full", "max_staleness": 2},
        "run": {"steps": 24, "save_every": 0, "save_hf": False, "rollouts": "all"},
    }
    out = tmp_path / "out"
    train_on_ray(on_ray(model, out, ray={"engines": 1, "rollouts": 1}, **given))
    assert "weights are updated in the middle of completions" in caplog.text
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert sum("sync/paused_s" in row for row in rows) > 12
    assert all(row["sync/audited"] == 1 for row in rows)
    assert sum(row["rollout/continued"] for row in rows) > 0
    rewards = [row["train/reward"] for row in rows]
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 4


def test_workers_of_vllms_own_do_not_go_to_rays_cluster(model):
    """Check that vLLM's workers do not take the bundles.

    A process that finds Ray and a placement group uses its bundles, which the replica occupies.
    """
    group = placement_group([{"CPU": 1}])
    inside = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    asked = (
        ray.remote(num_cpus=1)(executor_of).options(scheduling_strategy=inside).remote(str(model))
    )
    assert ray.get(asked, timeout=600) == "mp"
    remove_placement_group(group)


SERVE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":  # vLLM starts processes
    folder, prompts = json.loads(sys.argv[1])
    greedy = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0)
    for output in LLM(folder, dtype="float32", enforce_eager=True).generate(prompts, greedy):
        said = output.outputs[0]
        row = {"prompt": output.prompt_token_ids, "tokens": said.token_ids, "text": said.text,
               "log_probs": [at[token].logprob for at, token in zip(said.logprobs, said.token_ids)]}
        print("served", json.dumps(row), flush=True)
"""


def served(folder: Path, prompts: list[str], script: Path) -> list[dict]:
    """Return vLLM's outputs for a folder and texts, by its own tokenizer.

    It runs in a process as a user starts it.
    """
    script.write_text(SERVE)
    done = subprocess.run(
        [sys.executable, str(script), json.dumps([str(folder), prompts])],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("served ")]


def test_vllm_and_transformers_say_the_same_of_the_exported_folder(alone, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = alone("grpo") / "hf"
    prompts = ["1+2=", "9+9=", "7+0=", "40=3"]
    rows = served(folder, prompts, tmp_path / "serve.py")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for prompt, row in zip(prompts, rows, strict=True):
        given = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        said = model.generate(
            **given,
            max_new_tokens=12,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = said.sequences[0, given["input_ids"].shape[1] :]
        assert row["prompt"] == given["input_ids"][0].tolist()
        assert row["tokens"] == tokens.tolist()
        assert row["text"] == tokenizer.decode(tokens, skip_special_tokens=True)
        logs = torch.cat(said.logits).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        assert row["log_probs"] == pytest.approx(logs.tolist(), abs=1e-4)
