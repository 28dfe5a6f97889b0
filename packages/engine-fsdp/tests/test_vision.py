"""Vision-language models of each family, against transformers in float64, document by document."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import IMAGE, PICTURED_TYPES, VIDEO, tiny_model, tiny_pictured_model
from torch import nn
from transformers import AutoModelForImageTextToText, LlavaConfig, LlavaForConditionalGeneration

from engine_api import (
    Batch,
    EngineConfig,
    EngineRegistry,
    LoraConfig,
    Memory,
    ModelSource,
    OptimizerConfig,
    Precision,
    sft_loss,
)
from engine_api.distillation import Teaching
from engine_api.errors import BatchError, ConfigError, UnsupportedCapability
from engine_api.hf_vision import FAMILIES, VIDEO_FAMILIES, Vision
from engine_api.results import LossOutput, TokenOutputs
from engine_fsdp.engine import FSDPEngine
from engine_fsdp.plugin import PLUGIN
from engine_torch import model as model_module
from engine_torch import vision as vision_module

# Differences of float32 from float64: of log-probs in nats, and of a gradient from its norm.
NEAR = 1e-4
NEAR_GRADIENT = 1e-3


def make(folder: Path, model: dict[str, Any] | None = None, **config: Any) -> Any:
    settings = {"optimizer": OptimizerConfig(lr=1e-2), "memory": Memory(max_tokens=24)} | config
    engine = EngineRegistry.create(
        backend="fsdp2",
        device="cpu",
        config=EngineConfig(model=ModelSource(path=str(folder), **(model or {})), **settings),
    )
    engine.initialize()
    return engine


def document(
    vision: Vision, seed: int, *parts: int | tuple[int, int] | tuple[int, int, int]
) -> dict[str, Any]:
    """Return a random document of numbers of text tokens, images of patches, and videos.

    An image has its height and width, and a video its rows in time before them.
    """
    generator = torch.Generator().manual_seed(seed)
    ids: list[torch.Tensor] = []
    pixels: list[torch.Tensor] = []
    grids: list[list[int]] = []
    seconds: list[float] = []
    for part in parts:
        if isinstance(part, int):
            ids.append(torch.randint(3, IMAGE, (part,), generator=generator))
            continue
        is_video = len(part) == 3
        grids.append([1, *part][-3:] if vision.has_grid else [1, 1, 1])
        # At three frames a second, of which two are one row in time.
        seconds.append(2 / 3 if is_video else 0.0)
        rows = math.prod(grids[-1])
        pixels.append(torch.randn(rows, *vision.row_shape, generator=generator))
        features = vision.count_features(grids[-1])
        if not is_video:
            ids.append(torch.full((features,), IMAGE))
            continue
        frames = grids[-1][0] if vision.by_frame else 1
        for _ in range(frames):
            ids.append(torch.randint(3, IMAGE, (2,), generator=generator))
            ids.append(torch.full((features // frames,), VIDEO))
    tokens = torch.cat(ids)
    weight = torch.ones(len(tokens))
    weight[0] = 0.0
    found: dict[str, Any] = {"input_ids": tokens, "loss_weight": weight}
    if pixels:
        found["media"] = {"pixels": torch.cat(pixels), "grid": torch.tensor(grids)}
        if any(seconds):
            found["media"]["seconds"] = torch.tensor(seconds)
    return found


def documents(vision: Vision) -> list[dict[str, Any]]:
    """Return documents with an image, none, and two, one of them at the very end."""
    return [
        document(vision, 1, 3, (4, 6), 5),
        document(vision, 2, 9),
        document(vision, 3, 2, (2, 4), 3, (6, 4)),
        document(vision, 4, 6),
    ]


def documents_with_videos(vision: Vision) -> list[dict[str, Any]]:
    """Return documents with a video, with videos and images in either order, and with none."""
    return [
        document(vision, 11, 3, (3, 2, 4), 4),
        document(vision, 12, 2, (4, 2), 3, (2, 2, 2), 2, (2, 4, 2)),
        document(vision, 13, 7),
        document(vision, 14, 1, (1, 4, 2), 2, (2, 2), 3),
    ]


def load_exact(folder: Path) -> Any:
    """Return transformers' own model in float64."""
    plain: Any = {"attn_implementation": "eager", "experts_implementation": "eager"}
    load: Any = AutoModelForImageTextToText.from_pretrained
    return load(folder, dtype=torch.float64, **plain).eval()


def distributions(model: Any, one: dict[str, Any], vision: Vision) -> torch.Tensor:
    """Return the log-probs ``[n - 1, V]`` from which a document's tokens are drawn."""
    ids = one["input_ids"]
    types = ((ids == IMAGE) + 2 * (ids == VIDEO)).int()[None]
    arguments: dict[str, Any] = {}
    if "media" in one and "seconds" in one["media"]:
        media = one["media"]
        is_video = media["seconds"] > 0
        of_video = is_video.repeat_interleave(media["grid"].prod(-1))
        arguments = {
            "mm_token_type_ids": types,
            "pixel_values_videos": media["pixels"][of_video].double(),
            "video_grid_thw": media["grid"][is_video],
            "second_per_grid_ts": media["seconds"][is_video],
        }
        if not is_video.all():
            arguments["pixel_values"] = media["pixels"][~of_video].double()
            arguments["image_grid_thw"] = media["grid"][~is_video]
    elif "media" in one:
        arguments["pixel_values"] = one["media"]["pixels"].double()
        if vision.has_grid:
            arguments["image_grid_thw"] = one["media"]["grid"]
            arguments["mm_token_type_ids"] = types
        if vision.bidirectional:
            arguments["token_type_ids"] = types
    return model(input_ids=ids[None], use_cache=False, **arguments).logits[0, :-1].log_softmax(-1)


def expect(
    folder: Path, given: list[dict[str, Any]], vision: Vision
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return log-probs and gradients of transformers' own model in float64, without a pack."""
    model = load_exact(folder)
    total = sum(float(one["loss_weight"].sum()) for one in given)
    found: list[torch.Tensor] = []
    for one in given:
        picked = distributions(model, one, vision).gather(-1, one["input_ids"][1:, None])[:, 0]
        (-(picked * one["loss_weight"][1:]).sum() / total).backward()
        found.append(torch.cat([picked.new_zeros(1), picked.detach()]))
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return torch.cat(found), gradients


def check_gradients(engine: Any, gradients: dict[str, torch.Tensor]) -> None:
    """Compare the gradient of every weight."""
    whole = torch.stack([one.norm() for one in gradients.values()]).norm()
    for entry in engine.table:
        grad = entry.param.grad
        assert (grad is None) == (entry.name not in gradients), entry.name
        if grad is not None:
            true = gradients[entry.name]
            apart = (grad.double() - true).norm() / max(true.norm(), 1e-3 * whole)
            assert apart < NEAR_GRADIENT, (entry.name, float(apart))


def test_every_family_has_a_tiny_model() -> None:
    assert set(PICTURED_TYPES) == set(FAMILIES)


@pytest.mark.parametrize("model_type", PICTURED_TYPES)
def test_a_mixed_pack_is_computed_as_each_document_alone(tmp_path: Path, model_type: str) -> None:
    """Log-probs, the gradient of every weight, the export and a reload, for each family."""
    folder = tmp_path / "model"
    tiny_pictured_model(model_type).save_pretrained(folder)
    engine = make(folder)
    given = documents(engine.vision)
    want, gradients = expect(folder, given, engine.vision)
    batch = Batch.pack(given)
    got = engine.infer_batch(batch).log_probs
    torch.testing.assert_close(got.double(), want, atol=NEAR, rtol=0)
    result = engine.forward_backward(batch, sft_loss)
    assert result.num_micro_batches > 1
    check_gradients(engine, gradients)
    engine.optimizer_step()
    engine.save_hf(tmp_path / "saved")
    stepped = engine.infer_batch(batch).log_probs
    engine.close()
    again, _ = expect(tmp_path / "saved", given, engine.vision)
    torch.testing.assert_close(stepped.double(), again, atol=NEAR, rtol=0)
    assert set(load_file(folder / "model.safetensors")) == set(
        load_file(tmp_path / "saved" / "model.safetensors")
    )


@pytest.mark.parametrize("model_type", VIDEO_FAMILIES)
def test_videos_are_computed_as_each_document_alone(tmp_path: Path, model_type: str) -> None:
    """Log-probs and the gradient of every weight, with images and text in the same pack."""
    tiny_pictured_model(model_type).save_pretrained(tmp_path)
    engine = make(tmp_path)
    given = [*documents_with_videos(engine.vision), document(engine.vision, 1, 3, (4, 6), 5)]
    want, gradients = expect(tmp_path, given, engine.vision)
    batch = Batch.pack(given)
    got = engine.infer_batch(batch).log_probs
    torch.testing.assert_close(got.double(), want, atol=NEAR, rtol=0)
    result = engine.forward_backward(batch, sft_loss)
    assert result.num_micro_batches > 1
    check_gradients(engine, gradients)
    engine.close()


@pytest.mark.parametrize("model_type", VIDEO_FAMILIES)
def test_a_frozen_tower_shows_videos(tmp_path: Path, model_type: str) -> None:
    tiny_pictured_model(model_type).save_pretrained(tmp_path)
    engine = make(tmp_path, {"freeze": ["vision"]}, memory=Memory(max_tokens=1000))
    given = documents_with_videos(engine.vision)
    _, gradients = expect(tmp_path, given, engine.vision)
    engine.forward_backward(Batch.pack(given), sft_loss)
    tower = {name for name in gradients if ".visual." in name}
    assert tower
    check_gradients(engine, {n: one for n, one in gradients.items() if n not in tower})
    engine.close()


def test_the_time_between_frames_moves_the_positions_of_qwen2_5(tmp_path: Path) -> None:
    """Two frames in 2/3 of a second lie 2 positions apart, and in 3 seconds 12."""
    tiny_pictured_model("qwen2_5_vl").save_pretrained(tmp_path)
    engine = make(tmp_path)
    given = document(engine.vision, 11, 3, (3, 2, 4), 4)
    fast = engine.infer_batch(Batch.pack([given])).log_probs
    given["media"]["seconds"] = torch.tensor([3.0])
    slow = engine.infer_batch(Batch.pack([given])).log_probs
    want, _ = expect(tmp_path, [given], engine.vision)
    torch.testing.assert_close(slow.double(), want, atol=NEAR, rtol=0)
    assert float((slow - fast).abs().max()) > 100 * NEAR
    engine.close()


def test_videos_that_are_not_those_of_their_tokens_are_refused(folder: Path) -> None:
    engine = make(folder)
    good = document(engine.vision, 12, 2, (4, 2), 3, (2, 2, 2), 2)

    def changed(**parts: Any) -> Batch:
        return Batch.pack([good | {"media": good["media"] | parts}])

    seconds = good["media"]["seconds"]
    with pytest.raises(BatchError, match="has 2 images of 4 features, and 2 image tokens"):
        engine.infer_batch(changed(seconds=torch.zeros(2)))
    turned = {"pixels": good["media"]["pixels"].roll(8, 0), "grid": good["media"]["grid"][[1, 0]]}
    with pytest.raises(BatchError, match="next comes a video"):
        engine.infer_batch(changed(seconds=seconds[[1, 0]], **turned))
    alone = {"input_ids": torch.tensor([1, VIDEO, 2]), "loss_weight": torch.ones(3)}
    alone["loss_weight"][0] = 0
    with pytest.raises(BatchError, match="document 0 has 0 videos of 0 features, and 1 video tok"):
        engine.infer_batch(Batch.pack([alone]))
    joined = torch.cat([torch.tensor([1]), torch.full((2,), VIDEO), torch.tensor([2])])
    own = {name: good["media"][name][1:] for name in ("grid", "seconds")}
    own["pixels"] = good["media"]["pixels"][8:]
    one_run = {"input_ids": joined, "loss_weight": torch.tensor([0.0, 1, 1, 1]), "media": own}
    with pytest.raises(BatchError, match="in 1 runs, expected 2, one for each row in time"):
        engine.infer_batch(Batch.pack([one_run]))
    engine.close()


def test_an_engine_without_videos_refuses_them_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FSDPEngine, "capabilities", PLUGIN.capabilities - {"video"})
    engine = make(folder)
    given = documents_with_videos(engine.vision)
    with pytest.raises(UnsupportedCapability) as caught:
        engine.infer_batch(Batch.pack(given))
    assert caught.value.capability == "video"
    assert caught.value.remedy
    engine.close()


@pytest.mark.parametrize("model_type", PICTURED_TYPES)
def test_the_tower_attends_by_the_engines_function_and_the_text_by_its_own(
    tmp_path: Path, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers calls any other function once for each window of an image."""
    tiny_pictured_model(model_type).save_pretrained(tmp_path)
    calls: list[nn.Module] = []
    attend = vision_module.attend_by_image

    def note(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        calls.append(module)
        return attend(module, *arguments, **options)

    monkeypatch.setattr(vision_module, "attend_by_image", note)
    engine = make(tmp_path, memory=Memory(max_tokens=1000))
    given = documents(engine.vision)
    calls.clear()
    engine.infer_batch(Batch.pack(given))
    # One micro-batch: one call for each layer of the tower, whatever the number of windows.
    assert calls
    assert len(calls) == len(set(calls))
    text = set(engine.module.lm.base_model.language_model.modules())
    assert not text & set(calls)
    engine.close()


def test_a_window_shorter_than_an_image_is_the_familys_own(tmp_path: Path) -> None:
    """Gemma 3's windows hide an image's tokens that lie further back, and none that follow."""
    tiny_pictured_model("gemma3", {"sliding_window": 2}).save_pretrained(tmp_path)
    engine = make(tmp_path)
    assert engine.vision.features_per_row > 2
    given = documents(engine.vision)
    want, _ = expect(tmp_path, given, engine.vision)
    got = engine.infer_batch(Batch.pack(given)).log_probs
    torch.testing.assert_close(got.double(), want, atol=NEAR, rtol=0)
    engine.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Qwen3-VL."""
    place = tmp_path_factory.mktemp("pictured") / "model"
    tiny_pictured_model("qwen3_vl").save_pretrained(place)
    return place


class Distils:
    """The weighted sum of the divergence to a teacher, with each token's as a metric."""

    needs = ("log_probs", "divergence")
    teaching = Teaching(vocabulary=IMAGE)

    def __call__(self, outputs: TokenOutputs, batch: Batch) -> LossOutput:
        assert batch.media is None
        assert outputs.divergence is not None
        tokens = zip(batch["place"].tolist(), outputs.divergence.detach(), strict=True)
        metrics = {f"token {place}": value for place, value in tokens}
        return LossOutput(loss=(batch.loss_weight * outputs.divergence).sum(), metrics=metrics)


def test_a_student_with_images_learns_from_a_teacher_with_images(
    folder: Path, tmp_path: Path
) -> None:
    """Each token's divergence, and the gradient of every weight, the tower's too."""
    tiny_pictured_model("gemma3").save_pretrained(tmp_path)
    teacher = make(tmp_path, optimizer=None)
    engine = make(folder)
    # The two models take other rows of pixels, and make as many features of this image.
    given, seen = (
        [document(vision, 1, 3, (4, 4), 5), document(vision, 2, 9)]
        for vision in (engine.vision, teacher.vision)
    )
    seen = [one | {"input_ids": other["input_ids"]} for one, other in zip(seen, given, strict=True)]
    batch = Batch.pack(given)
    places = torch.arange(batch.num_tokens)
    states = teacher.infer_states(Batch.pack(seen))
    engine.set_teacher(teacher.output_head())
    taught = batch.with_fields(teacher_states=states, place=places)
    result = engine.forward_backward(taught, Distils())

    student, exact = load_exact(folder), load_exact(tmp_path)
    total = sum(float(one["loss_weight"].sum()) for one in given)
    want: list[torch.Tensor] = []
    for one, other in zip(given, seen, strict=True):
        log_p = distributions(student, one, engine.vision)[:, :IMAGE].log_softmax(-1)
        with torch.no_grad():
            log_q = distributions(exact, other, teacher.vision)[:, :IMAGE].log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        ((kl * one["loss_weight"][1:]).sum() / total).backward()
        want.append(torch.cat([kl.new_zeros(1), kl.detach()]))
    got = torch.tensor([result.metrics[f"token {place}"] for place in places.tolist()])
    torch.testing.assert_close(got.double(), torch.cat(want), atol=NEAR, rtol=0)
    gradients = {n: p.grad for n, p in student.named_parameters() if p.grad is not None}
    assert any(".visual." in name for name in gradients)
    check_gradients(engine, gradients)
    engine.close()
    teacher.close()


def test_text_alone_runs_no_tower(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(folder)
    monkeypatch.setattr(
        model_module, "compute_features", lambda *_, **__: pytest.fail("the tower was run")
    )
    before = {name: one.clone() for name, one in engine.get_per_tensor_param()}
    batch = Batch.pack([document(engine.vision, 2, 9), document(engine.vision, 4, 6)])
    assert engine.train_batch(batch, sft_loss).grad_norm > 0
    after = dict(engine.get_per_tensor_param())
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert not any(name.startswith("model.visual.") for name in changed)
    engine.close()


def test_a_frozen_tower_stays_as_it_was(folder: Path) -> None:
    engine = make(folder, {"freeze": ["vision"]})
    before = {name: one.clone() for name, one in engine.get_per_tensor_param()}
    engine.train_batch(Batch.pack(documents(engine.vision)), sft_loss)
    after = dict(engine.get_per_tensor_param())
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if not name.startswith("model.visual.")}
    engine.close()


def test_adapters_are_of_the_language_model_alone(folder: Path) -> None:
    engine = make(folder, lora=LoraConfig(rank=2, target_modules="all-linear"))
    adapted = {entry.name for entry in engine.table if entry.adapter}
    assert adapted
    assert not any(".visual." in name for name in adapted)
    assert engine.train_batch(Batch.pack(documents(engine.vision)), sft_loss).grad_norm > 0
    engine.close()


def test_bfloat16_is_near_and_rotary_positions_of_the_tower_stay_float32(folder: Path) -> None:
    engine = make(folder, precision=Precision(compute="bfloat16"))
    given = documents(engine.vision)
    want, _ = expect(folder, given, engine.vision)
    got = engine.infer_batch(Batch.pack(given)).log_probs
    assert float((got.double() - want).abs().mean()) < 0.05
    kinds: set[torch.dtype] = set()
    block = engine.module.lm.model.visual.blocks[0].attn
    block.register_forward_pre_hook(
        lambda _m, _a, options: kinds.update(x.dtype for x in options["position_embeddings"]),
        with_kwargs=True,
    )
    engine.infer_batch(Batch.pack(given))
    assert kinds == {torch.float32}
    engine.close()


def test_recomputing_changes_no_gradient(folder: Path) -> None:
    norms: list[float] = []
    for recompute in ("none", "full"):
        engine = make(folder, memory=Memory(max_tokens=24, recompute=recompute))
        norms.append(engine.train_batch(Batch.pack(documents(engine.vision)), sft_loss).grad_norm)
        engine.close()
    assert norms[0] == norms[1] > 0


def test_the_check_at_the_start_sees_an_image(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features of the next token, as a wrong offset would give, are found before training."""
    take = vision_module._take

    def shifted(features: Any, own: slice, places: torch.Tensor | None) -> Any:
        taken = take(features, own, places)
        if isinstance(taken, tuple):
            return tuple(part.roll(1, 0) for part in taken)
        return taken.roll(1, -2)

    monkeypatch.setattr(vision_module, "_take", shifted)
    with pytest.raises(UnsupportedCapability, match="packed outputs differ from the model's own"):
        make(folder)


def test_an_engine_without_the_capability_refuses_the_model_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FSDPEngine, "capabilities", PLUGIN.capabilities - {"vision"})
    monkeypatch.setattr(model_module, "WeightFiles", lambda _: pytest.fail("weights were read"))
    with pytest.raises(UnsupportedCapability, match="vision_config") as caught:
        make(folder)
    assert caught.value.capability == "vision"
    assert caught.value.remedy


def test_other_towers_value_models_and_text_models_are_refused_by_name(tmp_path: Path) -> None:
    tower = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    text = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1}
    config = LlavaConfig(vision_config=tower, text_config=text)
    LlavaForConditionalGeneration(config).save_pretrained(tmp_path / "llava")
    with pytest.raises(UnsupportedCapability, match="no test has compared its tower"):
        make(tmp_path / "llava")
    tiny_model("qwen3").save_pretrained(tmp_path / "text")
    with pytest.raises(ConfigError, match=r"model\.freeze: .*for a model without a tower"):
        make(tmp_path / "text", {"freeze": ["vision"]})
    engine = make(tmp_path / "text")
    seen = document(Vision(image_token=IMAGE, video_token=None, row_shape=(3,)), 1, 2, (2, 2), 2)
    with pytest.raises(BatchError, match="1 images for a model without a vision tower"):
        engine.infer_batch(Batch.pack([seen]))
    engine.close()


def test_a_value_model_with_a_tower_is_refused(folder: Path) -> None:
    config = EngineConfig(model=ModelSource(path=str(folder)))
    engine = EngineRegistry.create(
        model_type="value_model", backend="fsdp2", device="cpu", config=config
    )
    with pytest.raises(UnsupportedCapability, match="value model") as caught:
        engine.initialize()
    assert caught.value.capability == "vision"


def test_shared_prefixes_are_refused_with_a_tower(folder: Path) -> None:
    """Documents with other images begin alike by their ids."""
    with pytest.raises(ConfigError, match=r"memory\.share_prefixes: .* vision tower") as caught:
        make(folder, memory=Memory(share_prefixes=True))
    assert caught.value.remedy


def test_experts_are_read_and_saved_in_the_order_of_the_folder(tmp_path: Path) -> None:
    """The published Qwen3-VL-MoE has its experts' matrices exchanged, transformers' own not."""
    own = tmp_path / "own"
    tiny_pictured_model("qwen3_vl_moe").save_pretrained(own)
    exchanged = tmp_path / "exchanged"
    exchanged.mkdir()
    (exchanged / "config.json").write_text((own / "config.json").read_text())
    tensors = load_file(own / "model.safetensors")
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    assert tensors[name].shape[1] != tensors[name].shape[2]
    tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, exchanged / "model.safetensors", metadata={"format": "pt"})
    plain = make(own)
    engine = make(exchanged)
    batch = Batch.pack(documents(engine.vision))
    want = plain.infer_batch(batch).log_probs
    assert torch.equal(engine.infer_batch(batch).log_probs, want)
    assert torch.equal(dict(engine.get_per_tensor_param())[name], tensors[name])
    engine.train_batch(batch, sft_loss)
    stepped = engine.infer_batch(batch).log_probs
    engine.save_checkpoint(tmp_path / "checkpoint").result()
    engine.load_checkpoint(tmp_path / "checkpoint")
    assert torch.equal(engine.infer_batch(batch).log_probs, stepped)
    engine.close()
    plain.close()
