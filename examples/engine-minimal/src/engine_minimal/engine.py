"""Data parallel by all-reduce: every rank holds the whole model, and gradients are added up before a step."""

import math
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM

from engine_api import BaseEngine, Batch, Capability, ModelSource, ShardSpec, TokenOutputs, Topology
from engine_api.capabilities import unsupported
from engine_api.comm import SingleComm, TorchComm, together
from engine_api.contract import Adapter
from engine_api.errors import ConfigError
from engine_api.hf_names import pieces_of
from engine_api.manifest import Entry
from engine_api.optimizers import build_optimizer, loaded_dtypes, state_fields
from engine_api.weights import WeightExport


class MinimalEngine(BaseEngine):
    """Log-probs and entropy of a causal language model, computed one document at a time in float32."""

    def _build(self) -> None:
        if self.config.options:
            raise ConfigError(
                "options", f"{self.config.options}, but there are none", remedy="leave them out"
            )
        if self.device_type == "cuda" and "LOCAL_RANK" in os.environ:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if (
            "RANK" in os.environ and not dist.is_initialized()
        ):  # torchrun; the group stays for the next engine
            dist.init_process_group()
        self.comm = TorchComm() if dist.is_initialized() else SingleComm()
        rank, world = self.comm.rank, self.comm.world_size
        if self.config.parallelism.dp_shard not in (-1, world):
            raise ConfigError(
                "parallelism.dp_shard", f"is not the world of {world}", remedy="leave it out"
            )
        self.topology = Topology(
            rank=rank, world_size=world, dp_rank=rank, dp_size=world, sizes={"dp": world}
        )
        together(self.comm, self._build_model)  # a file may be damaged on one machine alone
        config = self.config.optimizer
        self.optimizer: Any = build_optimizer(config, self.weights.values()) if config else None

    def _build_model(self) -> None:
        source = self.config.model
        if source != ModelSource(path=source.path):
            raise ConfigError(
                "model", f"{source}", why="only model.path is read", remedy="leave the rest out"
            )
        options: dict[str, Any] = {
            "dtype": torch.float32,
            "use_safetensors": True,
            "output_loading_info": True,
        }
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(source.path, **options)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ConfigError(
                "model.path", f"{source.path!r} cannot be loaded", why=str(error)
            ) from error
        model, info = loaded
        if info["missing_keys"]:  # transformers has drawn them at random
            raise ConfigError("model.path", f"{source.path!r} lacks {sorted(info['missing_keys'])}")
        if any("expert" in name for name, _ in model.named_parameters()):
            raise unsupported(Capability.MOE, self._name, self.capabilities)
        self.model = model.to(self.device_type).eval()
        self.vocab_size = model.config.get_text_config().vocab_size
        pieces = pieces_of(model)  # Hugging Face names, layer by layer, tied weights once
        self.weights: dict[str, Tensor] = {
            pieces[name][0].name: param for name, param in model.named_parameters()
        }

    def forward_step(
        self,
        batch: Batch,
        *,
        needs: Sequence[str],
        temperature: float,
        coefficients: Tensor | None = None,
    ) -> TokenOutputs:
        """Each document in a forward of its own: none can see another."""
        # No element of a weight: the outputs of an empty micro-batch have a gradient path as well.
        log_probs = [next(iter(self.weights.values())).flatten()[:0]]
        entropy = list(log_probs)
        for ids in batch.input_ids.to(self.model.device).split(batch.lengths):
            logits = self.model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            rows = torch.log_softmax(logits / temperature, dim=-1)
            # The logits at t - 1 are about token t; nothing is about a first token.
            log_probs.append(pad(rows.gather(1, ids[1:, None])[:, 0], (1, 0)))
            entropy.append(pad(-(rows.exp() * rows).sum(-1), (1, 0)))
        return TokenOutputs(
            log_probs=torch.cat(log_probs),
            entropy=torch.cat(entropy) if "entropy" in needs else None,
        )

    def _clip_gradients(self, max_norm: float | None) -> float:
        for param in self.weights.values():
            if param.grad is None:  # this rank had no documents
                param.grad = torch.zeros_like(param)
            if dist.is_initialized():
                dist.all_reduce(
                    param.grad
                )  # a sum: the loss was divided by the denominator of all ranks
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
        """See ``Engine.get_per_tensor_param``; every rank has the whole tensors."""
        self._expect("get_per_tensor_param", "ready")
        if adapter == "only":
            raise unsupported(Capability.LORA, self._name, self.capabilities)
        if adapter != "merged":
            raise ConfigError("adapter", f"{adapter!r} is unknown", remedy="merged")
        return (
            (name, param.detach().to(dtype or param.dtype)) for name, param in self.weights.items()
        )

    def state_shards(self) -> dict[str, tuple[Tensor, ShardSpec]]:
        """Every rank holds all of the state; replica 0 writes, which the ranks are in turn."""
        state = {f"model.{name}": param.detach() for name, param in self.weights.items()}
        for name, param in self.weights.items() if self.optimizer else ():
            state |= {
                f"optim.{name}.{field}": value
                for field, value in self.optimizer.state.get(param, {}).items()
            }
        rank, world = self.topology.rank, self.topology.world_size
        return {
            k: (v, ShardSpec.whole(v.shape, (rank - i) % world))
            for i, (k, v) in enumerate(state.items())
        }

    def _optimizer_fields(self) -> Collection[str]:
        return state_fields(self.optimizer) if self.optimizer else ()

    def _state_layout(
        self, entries: Mapping[str, Entry]
    ) -> dict[str, tuple[ShardSpec, torch.dtype]]:
        wanted = {
            f"model.{name}": (ShardSpec.whole(param.shape), param.dtype)
            for name, param in self.weights.items()
        }
        kept = loaded_dtypes(self.optimizer, torch.float32, entries) if self.optimizer else {}
        for key, saved in entries.items() if self.optimizer else ():
            name, _, field = key.removeprefix("optim.").rpartition(".")
            if key.startswith("optim.") and name in self.weights:
                wanted[key] = ShardSpec.whole(saved.shape), kept[field]
        return wanted

    def _install_state(self, tensors: Mapping[str, Tensor]) -> None:
        state: dict[int, dict[str, Tensor]] = {}
        for index, (name, param) in enumerate(self.weights.items()):
            param.detach().copy_(tensors[f"model.{name}"])
            own = f"optim.{name}."
            state[index] = {
                key.removeprefix(own): value
                for key, value in tensors.items()
                if key.startswith(own)
            }
        if self.optimizer:
            self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state})

    def _release(self) -> None:
        self.comm.close()
        del self.model, self.weights, self.optimizer
