"""The limits of a GPU and its links, and the measured shares of them that this code reaches.

The shares are fitted to some rows of docs/benchmarks.md, named at each share. The rest of the rows
check the calculation.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A GPU type and its host.

    The limits are the vendor's, the fields ``…_share`` are measured shares of them, and the fields
    ``…_host_s`` are seconds of the host.
    """

    name: str = "H200"
    """Name of the GPU."""

    peak: float = 989.5e12
    """Peak of dense bf16 in FLOP/s.

    The peak of FP8 is twice as high.
    """

    hbm: float = 4.8e12
    """Bandwidth of the GPU's memory in bytes/s."""

    memory: float = 141e9
    """Memory of the GPU in bytes."""

    nvlink: float = 450e9
    """Bandwidth from a GPU to the other GPUs of its node, in bytes/s and one direction."""

    network: float = 50e9
    """Bandwidth from a GPU to other nodes, in bytes/s and one direction.

    It is assumed to be 400 Gbit/s per GPU, and was not measured.
    """

    node: int = 8
    """Number of GPUs that NVLink joins."""

    train_share: float = 0.52
    """Share of the peak in training, without the fixed time of a step.

    Fitted to 1.7B at 8,192 and 32,768 tokens.
    """

    serve_share: float = 0.50
    """Share of the bf16 peak in prefill and decoding, fitted to 8B with 512 sequences."""

    serve_share_fp8: float = 0.33
    """Share of the FP8 peak in prefill and decoding, fitted to 8B with 512 sequences."""

    stream_share: float = 0.80
    """Share of the memory bandwidth that the copy kernels reach.

    It holds for reading weights, keys and values, and for optimizer states.
    """

    sync_share: float = 0.63
    """Share of the memory bandwidth in a sync's many passes, fitted to 8B in bf16 on one GPU."""

    link_share: float = 0.60
    """Share of NVLink and of the network in collectives, fitted to the sync of 8B on two GPUs."""

    step_host_s: float = 0.025
    """Seconds of the host in a training step and micro-batch that no other work hides.

    Fitted to 0.6B and 1.7B.
    """

    decode_host_s: float = 0.0025
    """Seconds of the host in a decoding step.

    Fitted to a run of 0.6B with 128 sequences that is not in docs/benchmarks.md.
    """

    sync_host_s: float = 0.008
    """Seconds of the host in a sync, fitted to 0.6B."""

    link_latency_s: float = 10e-6
    """Assumed latency of one all-reduce while decoding, in seconds."""

    def link(self, gpus: int) -> tuple[float, str]:
        """Return the bytes/s of a collective over ``gpus`` GPUs, and the name of its link."""
        return (
            (self.nvlink * self.link_share, "NVLink")
            if gpus <= self.node
            else (self.network * self.link_share, "network")
        )


H200 = Hardware()
