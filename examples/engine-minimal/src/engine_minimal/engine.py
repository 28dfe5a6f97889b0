"""A data-parallel engine by all-reduce.

Every rank holds the whole model, and gradients are added over the ranks before a step.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from engine_api import BaseEngine, Batch, Capability, ModelSource, ShardSpec, TokenOutputs, Topology
from engine_api.arguments import check_export
from engine_api.capabilities import unsupported
from engine_api.comm import SingleComm, TorchComm, together
from engine_api.contract import Adapter
from engine_api.errors import ConfigError
from engine_api.hf_names import pieces_of
from engine_api.manifest import Entry
from engine_api.optimizers import build_optimizer, loaded_dtypes, state_fields
from engine_api.weights import WeightExport

StateLayout = dict[str, tuple[ShardSpec, torch.dtype]]


class MinimalEngine(BaseEngine):
    """The engine for log-probs and entropy, one document at a time in float32."""

    def _build(self) -> None:
        if self.config.options:
            raise ConfigError("options", "this engine has no options", remedy="leave them out")
        self._use_process_group()
        self.comm = TorchComm() if dist.get_world_size() > 1 else SingleComm()
        rank = self.comm.rank
        world = self.comm.world_size
        if self.config.parallelism.dp_shard not in (-1, world):
            raise ConfigError("parallelism.dp_shard", f"expected {world}", remedy="leave it out")
        self.topology = Topology(
            rank=rank, world_size=world, dp_rank=rank, dp_size=world, sizes={"dp": world}
        )
        # A file may be damaged on one machine only.
        together(self.comm, self._build_model)
        config = self.config.optimizer
        self.optimizer: Any = build_optimizer(config, self.weights.values()) if config else None

    def _build_model(self) -> None:
        path = self.config.model.path
        read = ModelSource(path=path)
        for field in fields(read):
            if getattr(self.config.model, field.name) != getattr(read, field.name):
                raise ConfigError(f"model.{field.name}", "it is not read", remedy="leave it out")
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, use_safetensors=True, output_loading_info=True
            )
        # ImportError: weights in a format of a library that is not installed.
        except (OSError, ImportError, ValueError, RuntimeError, SafetensorError) as error:
            raise ConfigError("model.path", f"{path!r} cannot be loaded", why=str(error)) from error
        model, info = loaded
        # transformers has drawn missing weights at random.
        if info["missing_keys"]:
            raise ConfigError("model.path", f"{path!r} lacks {sorted(info['missing_keys'])}")
        if any("expert" in name for name, _ in model.named_parameters()):
            raise unsupported(Capability.MOE, self._name, self.capabilities)
        # transformers' faster attention leaves out the caps of some models (Gemma 2).
        model.set_attn_implementation("eager")
        self.model = model.to(self.device_type).eval()
        self.vocab_size = model.config.get_text_config().vocab_size
        # Hugging Face names in the model's order, with tied weights once.
        pieces = pieces_of(model)
        self.weights = {pieces[name][0].name: param for name, param in model.named_parameters()}

    def _choices(self) -> Mapping[str, Any]:
        return {"model.attention": "eager"}

    def forward_step(
        self,
        batch: Batch,
        *,
        needs: Sequence[str],
        temperature: float,
        coefficients: Tensor | None = None,
    ) -> TokenOutputs:
        """Compute each document in a forward of its own, so that none can attend to another."""
        # An empty slice of a weight gives the outputs of an empty micro-batch a gradient path, too.
        values = [next(iter(self.weights.values())).flatten()[:0].expand(2, 0)]
        size = self.config.memory.logit_chunk
        for ids in batch.input_ids.to(self.model.device).split(batch.lengths):
            # The logits at t - 1 predict token t, and none predict a document's first token.
            chunks = torch.arange(len(ids) - 1, device=ids.device).split(size)
            # Logits exist chunk by chunk, because the backward pass computes them again.
            score = partial(checkpoint, self._score, ids, use_reentrant=False)
            scores = [score(chunk, temperature) for chunk in chunks]
            values.append(pad(torch.cat(scores, 1), (1, 0)))
        log_probs, entropy = torch.cat(values, 1)
        return TokenOutputs(log_probs=log_probs, entropy=entropy if "entropy" in needs else None)

    def _score(self, ids: Tensor, chunk: Tensor, temperature: float) -> Tensor:
        """Return log-probs and entropies ``[2, n]`` of the tokens that follow ``chunk``."""
        logits = self.model(ids[None], use_cache=False, logits_to_keep=chunk).logits[0]
        rows = torch.log_softmax(logits / temperature, dim=-1)
        log_probs = rows.gather(1, ids[chunk + 1, None])[:, 0]
        return torch.stack([log_probs, -(rows.exp() * rows).sum(-1)])

    def _clip_gradients(self, max_norm: float | None) -> float:
        for param in self.weights.values():
            # A rank without documents has no gradients.
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            # This adds, because the loss was already divided by the denominator of all ranks.
            dist.all_reduce(param.grad)
        return float(torch.nn.utils.clip_grad_norm_(self.weights.values(), max_norm or math.inf))

    def _apply_optimizer(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def _zero_grad(self) -> None:
        self.model.zero_grad()

    def get_per_tensor_param(
        self,
        *,
        dtype: torch.dtype | None = None,
        adapter: Adapter = "merged",
        bucket_bytes: int = 512 << 20,
    ) -> WeightExport:
        """Return whole weights by name, which every rank has (see ``Engine``)."""
        self._expect("get_per_tensor_param", "ready")
        check_export(dtype, bucket_bytes)
        self._check_adapter(adapter)
        return ((name, p.detach().to(dtype or p.dtype)) for name, p in self.weights.items())

    def state_shards(self) -> dict[str, tuple[Tensor, ShardSpec]]:
        """Return the whole state, which every rank has.

        Replica 0 of a tensor is written, so that rank 0 writes all of it.
        """
        state = {f"model.{name}": param.detach() for name, param in self.weights.items()}
        for name, param in self.weights.items() if self.optimizer else ():
            for field, value in self.optimizer.state.get(param, {}).items():
                state[f"optim.{name}.{field}"] = value
        return {key: (t, ShardSpec.whole(t.shape, self.comm.rank)) for key, t in state.items()}

    def _optimizer_fields(self) -> Collection[str]:
        return state_fields(self.optimizer) if self.optimizer else ()

    def _state_layout(self, entries: Mapping[str, Entry]) -> StateLayout:
        wanted = {}
        for name, param in self.weights.items():
            wanted[f"model.{name}"] = (ShardSpec.whole(param.shape), param.dtype)
        kept = loaded_dtypes(self.optimizer, torch.float32, entries) if self.optimizer else {}
        for key, saved in entries.items() if self.optimizer else ():
            name, _, field = key.removeprefix("optim.").rpartition(".")
            if key.startswith("optim.") and name in self.weights:
                wanted[key] = (ShardSpec.whole(saved.shape), kept[field])
        return wanted

    def _install_state(self, tensors: Mapping[str, Tensor]) -> None:
        state: dict[int, dict[str, Tensor]] = {}
        for index, (name, param) in enumerate(self.weights.items()):
            param.detach().copy_(tensors[f"model.{name}"])
            own = f"optim.{name}."
            state[index] = {k.removeprefix(own): tensors[k] for k in tensors if k.startswith(own)}
        if self.optimizer:
            self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state})

    def _release(self) -> None:
        self.comm.close()
        del self.model, self.weights, self.optimizer
