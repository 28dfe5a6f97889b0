# The trainer with the FSDP2 engine on a CPU, in the versions of constraints/cpu.txt. From the
# repository's root, the first command builds the image and the second one trains a small model from
# random weights (SFT, then RL on two processes), without a network:
#
#   docker build -f containers/cpu.Dockerfile -t enginehouse:cpu .
#   docker run --rm --network none --hostname localhost --shm-size 1g enginehouse:cpu \
#       sh -c "engine-train recipes copy quickstart && python recipes/quickstart/run.py"
ARG BASE=docker.io/library/python:3.11.14-slim-trixie
FROM ${BASE}

# A folder inside the image or a mounted one with a CPU build of torch, for a builder that cannot
# reach PyTorch's package index.
ARG FIND_LINKS=""
ENV UV_SYSTEM_PYTHON=1 UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1
# A dependency of reasoning-gym comes as C source, and torch.compile needs a compiler. Debian's
# archive keeps the newest version of a package only.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && pip install --no-cache-dir uv==0.13.8

COPY constraints /opt/enginehouse/constraints
COPY packages /opt/enginehouse/packages
COPY conformance /opt/enginehouse/conformance
COPY recipes /opt/enginehouse/recipes
WORKDIR /opt/enginehouse
RUN if [ -n "${FIND_LINKS}" ]; then export UV_FIND_LINKS="${FIND_LINKS}"; \
    else export UV_TORCH_BACKEND=cpu; fi; \
    uv pip install -c constraints/cpu.txt \
    --overrides constraints/veomni-overrides.txt \
    "./packages/engine-api[torch]" "./packages/engine-torch[lora]" "./packages/engine-fsdp[lora]" \
    "./packages/trainer[fsdp,gym,math,ray]" "./conformance[verify]"

RUN useradd --create-home --uid 10001 house \
    && install -d -o house /enginehouse /enginehouse/runs \
    /home/house/.cache /home/house/.cache/huggingface
USER 10001
WORKDIR /enginehouse
CMD ["engine-train", "--help"]
