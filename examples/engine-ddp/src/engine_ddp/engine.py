"""Data parallelism by torch's DistributedDataParallel, around models that transformers builds.

A micro-batch is one padded forward pass.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from engine_api import BaseEngine, Batch, Capability, ModelSource, ShardSpec, TokenOutputs, Topology
from engine_api.arguments import check_export
from engine_api.capabilities import unsupported
from engine_api.comm import SingleComm, TorchComm, together
from engine_api.contract import Adapter
from engine_api.errors import ConfigError
from engine_api.hf_config import read_hf_config
from engine_api.hf_names import pieces_of
from engine_api.manifest import Entry
from engine_api.optimizers import build_optimizer, loaded_dtypes, state_fields
from engine_api.weights import WeightExport
from engine_ddp.plugin import PLUGIN

StateLayout = dict[str, tuple[ShardSpec, torch.dtype]]


def add_over_ranks(
    state: None,
    bucket: dist.GradBucket,  # pyright: ignore[reportPrivateImportUsage] - DDP checks this type
) -> torch.futures.Future[Tensor]:
    """Add a bucket of gradients over the ranks, where DDP would average it."""
    del state
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


class TokenScores(nn.Module):
    """The module that DDP wraps: a model of transformers and its head, as values per token."""

    def __init__(self, model: Any, head: nn.Module, chunk: int) -> None:
        super().__init__()
        self.model = model
        self.head = head
        self.chunk = chunk

    def forward(self, documents: Tensor, temperature: float) -> Tensor:
        """Return values ``[K, D, L]`` of padded documents ``[D, L]``, 0 at first tokens."""
        # Padding is on the right, where causal attention does not see it.
        states = self.model.base_model(documents, use_cache=False).last_hidden_state[:, :-1]
        chunks = zip(
            states.flatten(0, 1).split(self.chunk),
            documents[:, 1:].flatten().split(self.chunk),
            strict=True,
        )
        # Logits exist chunk by chunk, because the backward pass computes them again.
        scores = [checkpoint(self.score, *c, temperature, use_reentrant=False) for c in chunks]
        # The state at t - 1 predicts token t, and none predicts a document's first token.
        return pad(torch.cat(scores, 1).unflatten(1, states.shape[:2]), (1, 0))

    def score(self, states: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """Return log-probs and entropies ``[2, N]`` of the tokens that follow N states."""
        rows = torch.log_softmax(self.head(states) / temperature, dim=-1)
        return torch.stack([rows.gather(1, targets[:, None])[:, 0], -(rows.exp() * rows).sum(-1)])


class TokenValues(TokenScores):
    """The same with a head of one label, which gives the values of a critic."""

    def score(self, states: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """Return the values ``[1, N]`` of the tokens that follow N states."""
        return self.head(states).T


class DdpEngine(BaseEngine):
    """The engine for log-probs and entropy."""

    auto_class: ClassVar[Any] = AutoModelForCausalLM
    scores: ClassVar[type[TokenScores]] = TokenScores

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
        together(self.comm, self._build_model)
        self._begins_call = True
        self.module = DistributedDataParallel(self.module, broadcast_buffers=False)
        self.module.register_comm_hook(None, add_over_ranks)
        config = self.config.optimizer
        self.optimizer: Any = build_optimizer(config, self.weights.values()) if config else None

    def _build_model(self) -> None:
        path = self.config.model.path
        read = ModelSource(path=path)
        for field in fields(read):
            if getattr(self.config.model, field.name) != getattr(read, field.name):
                raise ConfigError(f"model.{field.name}", "it is not read", remedy="leave it out")
        read_hf_config(path, remedy="use the file that belongs to the weights")
        try:
            loaded: Any = self.auto_class.from_pretrained(
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
        if (family := model.config.model_type) not in PLUGIN.families:
            known = ", ".join(PLUGIN.families)
            raise ConfigError("model.path", f"expected one of {known}, got a {family} model")
        if (rope := model.config.rope_parameters["rope_type"]) in ("dynamic", "longrope"):
            raise ConfigError("model.path", f"RoPE {rope} follows the longest document of a batch")
        if self.gives == ("values",) and model.config.num_labels != 1:
            raise ConfigError("model.path", f"expected 1 label, got {model.config.num_labels}")
        self.model = model.to(self.device_type).eval()
        head = model.get_output_embeddings() if "entropy" in self.gives else model.score
        self.module: Any = self.scores(model, head, self.config.memory.logit_chunk)
        self.vocab_size = model.config.get_text_config().vocab_size
        # Hugging Face names in the model's order, with tied weights once.
        pieces = pieces_of(model)
        self.weights = {pieces[name][0].name: param for name, param in model.named_parameters()}

    def _choices(self) -> Mapping[str, Any]:
        return {"model.attention": "sdpa"}

    @contextmanager
    def _accumulation(self, *, last: bool) -> Iterator[None]:
        # DDP adds up all that a gradient holds, and that of earlier calls is a sum over the ranks
        # already: rank 0 alone keeps it.
        if self._begins_call and self.topology.rank:
            self.model.zero_grad()
        self._begins_call = last
        with nullcontext() if last else self.module.no_sync():
            yield

    def forward_step(
        self,
        batch: Batch,
        *,
        needs: Sequence[str],
        temperature: float,
        coefficients: Tensor | None = None,
    ) -> TokenOutputs:
        """Compute all documents in one padded forward pass.

        An empty micro-batch computes one token and returns nothing of it, because DDP waits for
        gradients of every rank.
        """
        ids = batch.input_ids if batch.lengths else torch.zeros(1, dtype=torch.long)
        documents = list(ids.to(self.model.device).split(batch.lengths or (1,)))
        values = self.module(pad_sequence(documents, batch_first=True), temperature)
        rows = [values[:, d, :length] for d, length in enumerate(batch.lengths or (0,))]
        outputs = zip(self.gives, torch.cat(rows, 1), strict=True)
        return TokenOutputs(**{name: output for name, output in outputs if name in needs})

    def _clip_gradients(self, max_norm: float | None) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self.weights.values(), max_norm or math.inf))

    def _apply_optimizer(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def _zero_grad(self) -> None:
        self.model.zero_grad()
        self._begins_call = True

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
        """Return the whole state, of which rank 0 writes everything."""
        state = {f"model.{name}": param.detach() for name, param in self.weights.items()}
        for name, param in self.weights.items() if self.optimizer else ():
            for field, value in self.optimizer.state.get(param, {}).items():
                state[f"optim.{name}.{field}"] = value
        return {key: (t, ShardSpec.whole(t.shape, self.comm.rank)) for key, t in state.items()}

    def _optimizer_fields(self) -> Collection[str]:
        return state_fields(self.optimizer) if self.optimizer else ()

    def _state_layout(self, entries: Mapping[str, Entry]) -> StateLayout:
        weights = self.weights.items()
        wanted = {f"model.{name}": (ShardSpec.whole(p.shape), p.dtype) for name, p in weights}
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
        del self.model, self.module, self.weights, self.optimizer


class DdpValueEngine(DdpEngine):
    """The engine for values."""

    auto_class = AutoModelForTokenClassification
    scores = TokenValues
    gives = ("values",)
