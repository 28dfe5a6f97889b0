# The trainer with the Megatron engine and Transformer Engine, for NVIDIA GPUs, in the versions of
# constraints/cuda.txt. The host needs a driver for CUDA 13 and the NVIDIA container toolkit. From
# the repository's root, the first command builds the image (Transformer Engine compiles) and the
# second one trains on generated problems, on two GPUs with tensor parallelism:
#
#   docker build -f containers/cuda-megatron.Dockerfile -t enginehouse:cuda-megatron .
#   docker run --rm --gpus all --ipc host -v runs:/enginehouse/runs \
#       -v huggingface:/home/house/.cache/huggingface enginehouse:cuda-megatron \
#       sh -c "engine-train recipes copy rl/reasoning_gym && torchrun --standalone \
#       --nproc-per-node 2 -m engine_trainer rl recipes/rl/reasoning_gym.yaml \
#       engine.model.path=Qwen/Qwen3-0.6B engine.backend=megatron engine.parallelism.tp=2"
ARG BASE=docker.io/nvidia/cuda:13.0.2-devel-ubuntu24.04
FROM ${BASE}

# Triton and the servers compile kernels when they start: they need Python's headers, a compiler
# and, from the base image, nvcc. Ubuntu's archive keeps the newest version of a package only.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
    g++ gcc git ninja-build python3-dev python3-venv wget \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir uv==0.13.8
ENV PATH=/opt/venv/bin:${PATH} VIRTUAL_ENV=/opt/venv UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1

COPY constraints /opt/enginehouse/constraints
COPY packages /opt/enginehouse/packages
COPY conformance /opt/enginehouse/conformance
COPY recipes /opt/enginehouse/recipes
WORKDIR /opt/enginehouse
RUN uv pip install -c constraints/cuda.txt \
    "./packages/engine-api[torch]" "./packages/engine-torch[lora]" "./packages/engine-fsdp[lora]" \
    "./packages/engine-megatron[core]" "./packages/trainer[fsdp,gym,math,ray]" \
    "./conformance[verify]" "ray[default]" pip setuptools wheel

# PyPI has the extension for torch as source. The headers of cuDNN and NCCL are those of torch's own
# libraries: a second cuDNN of the system ends a run with an undefined symbol (docs/benchmarks.md).
ARG MAX_JOBS=4
RUN site=/opt/venv/lib/python3.12/site-packages/nvidia \
    && export CPATH="${site}/cudnn/include:${site}/nccl/include" \
    && NVTE_PYTORCH_FORCE_BUILD=TRUE uv pip install -c constraints/cuda.txt --no-build-isolation \
    "transformer-engine[pytorch,core-cu13]"

RUN useradd --create-home --uid 10001 house \
    && install -d -o house /enginehouse /enginehouse/runs \
    /home/house/.cache /home/house/.cache/huggingface
USER 10001
WORKDIR /enginehouse
CMD ["engine-train", "--help"]
