# The trainer with the FSDP2 engine and rollouts on vLLM, for NVIDIA GPUs, in the versions of
# constraints/cuda-vllm.txt. The host needs a driver for CUDA 13 and the NVIDIA container toolkit.
# From the repository's root, the first command builds the image and the second one trains on
# generated problems:
#
#   docker build -f containers/cuda-vllm.Dockerfile -t enginehouse:cuda-vllm .
#   docker run --rm --gpus all --ipc host -v runs:/enginehouse/runs \
#       -v huggingface:/home/house/.cache/huggingface enginehouse:cuda-vllm \
#       sh -c "engine-train recipes copy rl/reasoning_gym && engine-train rl \
#       recipes/rl/reasoning_gym.yaml engine.model.path=Qwen/Qwen3-0.6B rollout.name=vllm"
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
RUN uv pip install -c constraints/cuda-vllm.txt \
    "./packages/engine-api[torch]" "./packages/engine-torch[lora]" "./packages/engine-fsdp[lora]" \
    "./packages/trainer[fsdp,gym,math,ray]" "./packages/rollout-fp8[vllm]" \
    "./conformance[verify]" "ray[default]"

RUN useradd --create-home --uid 10001 house \
    && install -d -o house /enginehouse /enginehouse/runs \
    /home/house/.cache /home/house/.cache/huggingface
USER 10001
WORKDIR /enginehouse
CMD ["engine-train", "--help"]
