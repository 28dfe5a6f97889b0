"""A user's own agent and reward, named by relative paths, in the workers of a Ray cluster."""

from __future__ import annotations

import pytest
from ray_runs import local_cluster, on_ray, result_of, tree

pytest.importorskip("ray", reason="the extra ray")
pytest.importorskip("engine_fsdp", reason="the loop needs an engine")
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

from engine_trainer.config import RLConfig  # noqa: E402 - behind importorskip
from engine_trainer.config.loading import from_tree  # noqa: E402
from engine_trainer.rl.loop import train_rl  # noqa: E402
from engine_trainer.rl.on_ray import train_on_ray  # noqa: E402

OWN = """
async def add(episode):
    await episode.generate(max_new_tokens=2)
    await episode.generate("=", max_new_tokens=2)
    return episode.end()

def sevens(sample):
    return sample.completion.count("7") / 4
"""


def test_an_agent_and_an_own_reward_give_the_bits_of_one_process(sums_model, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    own = {
        "agent": {"function": "own.py:add"},
        "reward": {"name": None, "function": "own.py:sevens", "workers": 1},
        "rollout": {"n": 8, "max_new_tokens": 8},
    }
    train_rl(from_tree(RLConfig, tree(sums_model, tmp_path / "alone", **own)))
    with local_cluster(4):
        train_on_ray(on_ray(sums_model, tmp_path / "ray", **own, ray={"engines": 1}))
    assert result_of(tmp_path / "ray") == result_of(tmp_path / "alone")
