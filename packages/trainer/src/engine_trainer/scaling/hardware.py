"""A GPU, its links, and which share of its limits our code was measured to reach.

The shares are fitted to some rows of docs/benchmarks.md (said beside each); the other rows check the calculation.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Limits are a vendor's; ``…_share`` what was measured; seconds are of the host.

    Attributes:
        peak: dense bf16 FLOP/s; FP8 has twice that.
        hbm: bytes/s.
        memory: bytes.
        nvlink: bytes/s of a GPU into its node's others, one direction.
        network: bytes/s of a GPU into other nodes, one direction. Assumed: 400 Gbit/s a GPU; nothing was measured.
        node: GPUs that NVLink joins.
    """

    name: str = "H200"
    peak: float = 989.5e12
    hbm: float = 4.8e12
    memory: float = 141e9
    nvlink: float = 450e9
    network: float = 50e9
    node: int = 8
    train_share: float = (
        0.52  # of peak, without what is fixed a step: 1.7B at 8,192 and 32,768 tokens
    )
    serve_share: float = 0.50  # of peak in bf16, prefill and decoding: 8B, 512 sequences
    serve_share_fp8: float = 0.33  # of the FP8 peak: 8B, 512 sequences
    stream_share: float = (
        0.80  # of HBM, reading weights, keys and values, optimizer states: the copy kernels
    )
    sync_share: float = 0.63  # of HBM in a sync's many passes: 8B in bf16 on one GPU
    link_share: float = (
        0.60  # of NVLink and of the network in collectives: the sync of 8B on two GPUs
    )
    step_host_s: float = (
        0.025  # of a training step and micro-batch that nothing hides: 0.6B and 1.7B
    )
    decode_host_s: float = (
        0.0025  # of a decoding step: 0.6B, 128 sequences, a run that is not in docs/benchmarks.md
    )
    sync_host_s: float = 0.008  # of a sync: 0.6B
    link_latency_s: float = 10e-6  # of one all-reduce while decoding. Assumed.

    def link(self, gpus: int) -> tuple[float, str]:
        """Bytes/s that a collective over so many GPUs reaches, and the name of the link."""
        return (
            (self.nvlink * self.link_share, "NVLink")
            if gpus <= self.node
            else (self.network * self.link_share, "network")
        )


H200 = Hardware()
