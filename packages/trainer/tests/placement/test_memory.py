"""The memory estimate, by numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ray_runs import configure, on_ray
from tiny_models import tiny_pictured_model

from engine_api.config import ModelSource
from engine_api.errors import ConfigError
from engine_trainer.placement import memory
from engine_trainer.rehearsal.estimate import checkpoint_bytes
from engine_trainer.rl.loop import train_rl


def needed(
    out, *, free: dict[str, float], device="cuda", engines=4, replicas=4, **sections
) -> None:
    """``memory.check`` of ranks and replicas on four GPUs, or all on a host."""
    config = on_ray(out, out, **sections)
    rooms = [memory.FreeMemory(device=name, free=int(room)) for name, room in free.items()]
    placed = rooms * 4 if len(rooms) == 1 else rooms
    engine = config.engine.build(seed=0, total_steps=1)
    memory.check(placed[:engines], placed[:replicas], config, engine, device)


def gpus(free: float) -> dict[str, float]:
    return {f"gpu{i}": free for i in range(4)}


@pytest.fixture
def eight_billion(monkeypatch):
    monkeypatch.setattr(memory, "count_parameters", lambda source, trunk=False: 8_000_000_000)


def test_a_vision_tower_counts(tmp_path):
    model = tiny_pictured_model("qwen3_vl")
    model.save_pretrained(tmp_path)
    counted = memory.count_parameters(ModelSource(path=str(tmp_path)))
    assert counted == sum(parameter.numel() for parameter in model.parameters())


def test_a_frozen_tower_has_neither_gradients_nor_moments(tmp_path):
    """The text's parameters have weight, gradient and two moments, the tower's the weight alone."""
    model = tiny_pictured_model("qwen3_vl")
    model.save_pretrained(tmp_path)
    whole = sum(parameter.numel() for parameter in model.parameters())
    tower = sum(parameter.numel() for parameter in model.model.visual.parameters())
    config = on_ray(tmp_path, tmp_path, engine={"model": {"path": str(tmp_path)}})
    trains = config.engine.build(seed=0, total_steps=1)
    freezes = replace(trains, model=replace(trains.model, freeze=["vision"]))
    text = whole - tower
    expected = {"policy": ((3 * text + tower) * 4, text * 4)}
    assert memory.engines_bytes(config, freezes, "cuda") == expected
    assert memory.engines_bytes(config, trains, "cuda") == {"policy": (3 * whole * 4, whole * 4)}
    engine = {"model": {"path": str(tmp_path), "freeze": ["vision"]}}
    frozen = on_ray(tmp_path, tmp_path, engine=engine)
    assert checkpoint_bytes(frozen) == (3 * text + tower) * 4
    assert checkpoint_bytes(config) == 3 * whole * 4


def test_the_memory_estimate_by_hand(eight_billion, tmp_path):
    """Check 8e9 parameters over 4 ranks by hand.

    Each has weight 4, gradient 4, moments 8 = 16 bytes, and 2 bytes for the replica in bf16.

    The replica is awake while there are no gradients, the engine trains while the replica sleeps.
    """
    engine, gradient, rollout = 32e9, 8e9, 16e9
    mixed = {"model": {"path": "m"}, "precision": {"compute": "bfloat16"}}

    def check(free, rollout=None, **engine_settings):
        needed(tmp_path, free=gpus(free), engine=mixed | engine_settings, rollout=rollout or {})

    check(engine - gradient + rollout)
    with pytest.raises(
        ConfigError,
        match=r"(?s)gpu0 has 37.3 GiB free; policy, rollout placed there need at least 37.3 GiB"
        r".*1 engine rank.s. of 29.8 GiB .policy 29.8. and 1 replica.s. of 14.9 GiB",
    ):
        check(engine - gradient + rollout - 1e6)
    check(engine + rollout, {"sleep": False})
    with pytest.raises(ConfigError, match=r"44\.7 GiB"):
        check(engine + rollout - 1e6, {"sleep": False})
    # By turns: but a sync brings the weights from one to the other, so that both are there.
    check(engine - gradient + rollout, {"offload_engine": True})
    with pytest.raises(ConfigError, match=r"(?s)37\.3 GiB.*time-shared"):
        check(engine - gradient + rollout - 1e6, {"offload_engine": True})
    # A sync needs 24e9 and 8e9 bytes, training 32e9.
    check(engine, {"offload_engine": True, "quantization": "fp8"})
    with pytest.raises(ConfigError, match=r"at least 29\.8 GiB"):
        check(engine - 1e6, {"offload_engine": True, "quantization": "fp8"})
    check(engine - gradient + rollout / 2, {"quantization": "fp8"})
    check(gradient + rollout, optimizer={"name": "torch.optim.SGD"})
    # The moments of this optimizer are unknown.
    check(gradient + rollout, optimizer={"name": "bitsandbytes.optim.AdamW8bit"})
    with pytest.raises(ConfigError, match=r"37\.3 GiB"):
        check(engine - gradient + rollout - 1e6, optimizer={"name": "torch.optim.Adam"})
    check(gradient + rollout, memory={"offload_optimizer": True})
    check(rollout, memory={"offload_params": True})
    check(engine / 4 + rollout, lora={"rank": 8})
    host = {"host": 4 * engine + 4 * rollout - 1e6}
    with pytest.raises(ConfigError, match="4 engine rank"):
        needed(tmp_path, free=host, device="cpu", engine=mixed)
    # Offloading from the host to the host frees nothing.
    for memory_given in ({"offload_params": True}, {"offload_optimizer": True}):
        with pytest.raises(ConfigError, match="4 engine rank"):
            needed(tmp_path, free=host, device="cpu", engine=mixed | {"memory": memory_given})


def test_the_memory_of_reference_and_critic_by_hand(eight_billion, tmp_path):
    """Check the bytes on each of four ranks by hand.

    The policy has 32e9, the reference 8e9 (weights alone), the critic in bf16 16e9, and the replica
    in float32 32e9.
    12e9 of it are gradients, which are not there while the replica is awake.
    """
    algorithm = {
        "kl": {"coefficient": 0.1},
        "advantage": "gae",
        "critic": {"precision": {"master": "bfloat16"}},
    }
    needed(tmp_path, free=gpus(76e9), algorithm=algorithm)
    with pytest.raises(ConfigError, match=r"of 52.2 GiB .policy 29.8, reference 7.5, critic 14.9."):
        needed(tmp_path, free=gpus(76e9 - 1e6), algorithm=algorithm)
    # An adapter is its own reference, and the critic may have its own where the policy has none.
    needed(
        tmp_path,
        free=gpus(8e9 + 32e9),
        algorithm={"kl": {"coefficient": 0.1}},
        engine={"lora": {"rank": 8}},
    )
    needed(
        tmp_path,
        free=gpus(24e9 + 4e9 + 32e9),
        algorithm={**algorithm, "kl": {}, "critic": {**algorithm["critic"], "lora": {"rank": 8}}},
    )


def test_by_turns_reference_and_critic_are_away_during_a_sync(eight_billion, tmp_path):
    """While it trains 32e9 + 8e9 + 16e9; in a sync the policy's 24e9 and the replica's 32e9."""
    algorithm = {
        "kl": {"coefficient": 0.1},
        "advantage": "gae",
        "critic": {"precision": {"master": "bfloat16"}},
    }
    needed(tmp_path, free=gpus(56e9), algorithm=algorithm, rollout={"offload_engine": True})
    with pytest.raises(ConfigError, match="time-shared"):
        needed(
            tmp_path, free=gpus(56e9 - 1e6), algorithm=algorithm, rollout={"offload_engine": True}
        )


def test_a_policy_that_is_only_measured_has_neither_reference_nor_critic(eight_billion, tmp_path):
    algorithm = {"kl": {"coefficient": 0.1}, "advantage": "gae", "critic": {}}
    needed(tmp_path, free=gpus(8e9 + 32e9), algorithm=algorithm, engine={"optimizer": None})


def test_without_ray_too_it_is_said_before_an_engine_is_made(sums_model, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "count_parameters", lambda source, trunk=False: 10**15)
    monkeypatch.setattr(
        "engine_trainer.placement.spmd.EngineRegistry.create",
        lambda **_: pytest.fail("an engine was made"),
    )
    with pytest.raises(
        ConfigError, match=r"GiB free; .* placed there need at least .* GiB"
    ) as caught:
        train_rl(configure(sums_model, tmp_path / "out"))
    assert "rollout.offload_engine" in caught.value.remedy


def test_the_parameters_are_counted_without_memory(sums_model):
    from safetensors.torch import load_file

    expected = sum(t.numel() for t in load_file(sums_model / "model.safetensors").values())
    assert memory.count_parameters(ModelSource(path=str(sums_model))) == expected
    untied = ModelSource(path=str(sums_model), config_overrides={"tie_word_embeddings": False})
    assert memory.count_parameters(untied) == expected + 16 * 32
    assert memory.count_parameters(untied, trunk=True) == expected
