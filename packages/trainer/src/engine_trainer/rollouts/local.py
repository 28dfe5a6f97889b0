"""The ``local`` rollout: a Hugging Face model in the trainer's own process."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch

from engine_api.config import ModelSource, check_choice
from engine_api.devices import device_of
from engine_api.errors import ConfigError, RolloutError
from engine_api.hf_config import require_memory, unbuildable
from engine_api.hf_folder import read_saved_tensors
from engine_api.hf_names import keep_float32
from engine_api.hf_routers import Routers
from engine_api.hf_vision import find_auto_class, has_vision, read_vision
from engine_api.registry import Resolution
from engine_api.requests import check_images, check_prompts, check_sampling, check_version
from engine_api.rollout import Completion, PromptImages, SamplingParams, SyncResult
from engine_api.weights import WeightExport
from engine_trainer.rollouts import attention
from engine_trainer.rollouts.decode import Decoded, decode
from engine_trainer.rollouts.images import VisionInputs
from engine_trainer.rollouts.sampling import uniforms
from engine_trainer.rollouts.verify import count_positions, verify_generation
from engine_trainer.rollouts.weights import WeightTable
from engine_trainer.utils.hf_models import hf_config

WHERE = "rollout 'local'"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LocalRollout:
    """A rollout that generates with a copy of the engine's weights.

    See ``engine_api.rollout.VisionRollout`` for the promises of its members. The model is built
    from its configuration alone; weights come only from ``update_weights``.

    Args:
        resolution: from the registry; its device is used.
        model: folder or hub id with a ``config.json``, which gives the architecture.
        pad_token_id: fills short prompts of a batch; it changes no result.
        eos_token_ids: end every completion, in addition to ``SamplingParams.stop_token_ids``.
        batch_size: number of completions that are generated at the same time.
        dtype: dtype of weights and computation; logits are converted to float32 before the softmax.
        routed_experts: True records the experts that serve each token (``Completion``).

    Raises:
        ConfigError: unknown dtype, batch size below 1.
        UnsupportedCapability: the experts of a model without any are to be recorded, or of one
            whose routers are not known; the model has a vision tower of a family that is not known.
        RolloutError: a model family that the weight sync cannot serve.
    """

    def __init__(
        self,
        *,
        resolution: Resolution,
        model: ModelSource,
        pad_token_id: int,
        eos_token_ids: Sequence[int] = (),
        batch_size: int = 64,
        dtype: str = "float32",
        routed_experts: bool = False,
    ) -> None:
        check_choice("rollout.options.dtype", dtype, tuple(_DTYPES))
        if batch_size < 1:
            raise ConfigError(
                "rollout.batch_size",
                f"expected at least 1, got {batch_size}",
                remedy="give at least 1",
            )
        self.weight_version = -1  # no weights yet
        self._kind = device_of(resolution.device)
        self._device = self._kind.current()
        self._source = model
        self._dtype = _DTYPES[dtype]
        self._pad = pad_token_id
        self._eos = tuple(eos_token_ids)
        self._batch_size = batch_size
        self._not_ready = "no weights have been installed"
        self._model: Any = self._build()
        self._routers = Routers(self._model, where=WHERE) if routed_experts else None
        self._text = self._model.config.get_text_config()
        self._vision = self._find_vision()
        self._limit = getattr(self._text, "max_position_embeddings", None) or sys.maxsize
        self._verified = False
        self._folder = read_saved_tensors(model.path)
        self._table: WeightTable | None = WeightTable(self._model, self._folder)
        self._shapes = {name: p.shape for name, p in self._model.named_parameters()}

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        images: Sequence[PromptImages | None] | None = None,
    ) -> list[Completion]:
        """Generate completions (see ``VisionRollout.generate``).

        The global random generators stay as they are. Raises ``RolloutError`` before a good weight
        sync, while asleep, for an empty prompt or one that is too long, and for images that are not
        those of their prompt.
        """
        if self._not_ready:
            raise RolloutError(
                "cannot generate",
                where=WHERE,
                why=self._not_ready,
                remedy="call update_weights first",
            )
        self._check(prompts, sampling)
        vision = None if self._vision is None else self._vision.vision
        check_images(prompts, images, vision, WHERE)
        media = [None if one is None else one.media for one in images or [None] * len(prompts)]
        numbers = uniforms(prompts, sampling, media) if prompts else torch.empty(0)
        stop = sorted({*self._eos, *sampling.stop_token_ids})
        found: dict[int, list[Completion]] = {}
        for chunk in self._chunks(prompts, sampling.n):
            rows = torch.cat([torch.arange(i * sampling.n, (i + 1) * sampling.n) for i in chunk])
            decoded = decode(
                self._model,
                [prompts[i] for i in chunk],
                sampling,
                numbers[rows],
                stop,
                self._pad,
                self._routers,
                self._vision,
                [media[i] for i in chunk],
            )
            for position, index in enumerate(chunk):
                own = range(position * sampling.n, (position + 1) * sampling.n)
                found[index] = self._completions(decoded, index, own)
        return [completion for index in range(len(prompts)) for completion in found[index]]

    def update_weights(self, export: WeightExport, version: int) -> SyncResult:
        """Install an export (see ``Rollout.update_weights``).

        Names must be the model's own Hugging Face names, each once. A tensor is copied as the
        export gives it, so that ``install`` is the one phase, and there is nothing to audit.
        """
        if self._table is None:
            raise RolloutError(
                "cannot take weights", where=WHERE, why=self._not_ready, remedy="call wake_up first"
            )
        self._not_ready = "the last weight sync failed, some weights are old and some are new"
        begin = time.perf_counter()
        # A stale export is read to its end too, because other ranks take part in its gathers.
        self._table.install(export)
        check_version(version, self.weight_version, where=WHERE)
        if not self._verified and self._limit >= count_positions(self._vision):
            self._not_ready = "this model family cannot be served"
            self._verified = verify_generation(
                self._model, self._text.vocab_size, self._dtype, WHERE, self._chunks, self._vision
            )
        if self._kind.has_streams:
            self._kind.module.synchronize(self._device)
        self.weight_version = version
        self._not_ready = ""
        return SyncResult(
            version=version,
            num_tensors=self._table.num_tensors,
            num_bytes=self._table.num_bytes,
            seconds={"install": time.perf_counter() - begin},
        )

    def sleep(self, weights: bool = True, kv_cache: bool = True) -> None:
        """Free the weights' memory.

        The modules stay, so that waking up is quick. Caches live for one call only.
        """
        del kv_cache
        if self._model is None:
            raise RolloutError(
                "cannot sleep", where=WHERE, why="it is closed", remedy="create another one"
            )
        if not weights:
            return
        self._table = None
        self._not_ready = "it sleeps"
        for parameter in self._model.parameters():
            parameter.data = parameter.data.new_empty(0)
        self._kind.empty_cache()

    def wake_up(self, weights: bool = True, kv_cache: bool = True) -> None:
        """Allocate the weights' memory.

        They are undefined until ``update_weights``.
        """
        del kv_cache
        if self._model is None:
            raise RolloutError(
                "cannot wake up", where=WHERE, why="it is closed", remedy="create another one"
            )
        if weights and self._table is None:
            for name, parameter in self._model.named_parameters():
                parameter.data = parameter.data.new_empty(self._shapes[name])
            self._table = WeightTable(self._model, self._folder)
            self._not_ready = "no weights have been installed since it woke up"

    def close(self) -> None:
        """Close the rollout (idempotent)."""
        self._model = None
        self._table = None
        self._not_ready = "it is closed"

    def _build(self) -> Any:
        source = self._source
        config = hf_config(
            source,
            key="model.path",
            remedy="give a folder that save_pretrained wrote, of a family that transformers knows",
        )
        self._kind.empty_cache()
        need = sum(
            parameter.nbytes for parameter in self._built(config, torch.device("meta")).parameters()
        )
        require_memory(config, source.path, need, self._kind.room()[1])
        model = self._built(config, self._device)
        if not model._supports_sdpa:  # noqa: SLF001 - transformers has no public name for it
            raise RolloutError(
                f"{type(model).__name__} has no sdpa attention",
                where=WHERE,
                remedy="use another rollout for this model family",
            )
        return model.requires_grad_(False).eval()

    def _find_vision(self) -> VisionInputs | None:
        """Return the model's side of images, or None for a model without a tower."""
        vision = read_vision(self._model.config, WHERE, videos=True)
        return None if vision is None else VisionInputs(self._model, vision)

    def _built(self, config: Any, device: torch.device) -> Any:
        # Building draws initial weights, which must not change the run's own random numbers.
        devices = [] if self._kind.rng_state() is None else [self._device]
        by_part = {"text_config": attention.NAME, "vision_config": "sdpa"}
        with torch.random.fork_rng(devices=devices, device_type=self._device.type), device:
            try:
                model = find_auto_class(config).from_config(
                    config,
                    dtype=self._dtype,
                    attn_implementation=by_part if has_vision(config) else attention.NAME,
                    trust_remote_code=self._source.trust_remote_code,
                )
            except Exception as error:
                # Each family's own code reads the configuration, and knows its own attention alone.
                raise unbuildable(config, self._source.path, error) from error
        keep_float32(model)
        return model

    def _check(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> None:
        check_sampling(sampling, WHERE)
        check_prompts(
            prompts,
            sampling.max_new_tokens,
            WHERE,
            vocabulary=self._text.vocab_size,
            limit=self._limit,
            room=f"the model has {self._limit} positions",
            remedy="shorten it, or lower max_new_tokens",
        )

    def _chunks(self, prompts: Sequence[Sequence[int]], n: int) -> list[list[int]]:
        """Return batches of prompts of similar length, so that little is padded.

        Each batch has at least one prompt.
        """
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
        size = max(1, self._batch_size // n)
        # Llama 4 scales queries by their position in the batch, padding included.
        by_position = getattr(self._text, "attn_temperature_tuning", False)
        same_length = groupby(order, key=lambda i: len(prompts[i]) if by_position else 0)
        groups = [list(group) for _, group in same_length]
        return [group[at : at + size] for group in groups for at in range(0, len(group), size)]

    def _completions(self, decoded: Decoded, index: int, rows: range) -> list[Completion]:
        completions: list[Completion] = []
        for row in rows:
            length = int(decoded.lengths[row])
            completions.append(
                Completion(
                    prompt_index=index,
                    tokens=decoded.tokens[row, :length].tolist(),
                    log_probs=decoded.log_probs[row, :length].tolist(),
                    weight_versions=[self.weight_version] * length,
                    finish_reason="stop" if decoded.stopped[row] else "length",
                    routed_experts=None if decoded.experts is None else decoded.experts[row],
                )
            )
        return completions
