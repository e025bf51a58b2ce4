# CPU:         docker build -t ppo-rosetta .
# NVIDIA GPU:  docker build --build-arg DEVICE=cuda -t ppo-rosetta:cuda .
# Run:         docker run --rm --init [--gpus all] -v "$PWD/runs:/ppo/runs" ppo-rosetta
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}

# torch.compile needs a C++ compiler at run time, and each run records its git commit.
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install --yes --no-install-recommends g++ git \
  && rm -rf /var/lib/apt/lists/*

WORKDIR /ppo
COPY requirements.txt requirements-cuda.txt requirements-lock.txt ./
ARG DEVICE=cpu
# As in setup.sh: without a GPU, install the CPU build of torch, or torch from PyPI if that fails.
RUN python3 -m venv /opt/venv \
  && pip="/opt/venv/bin/pip --no-cache-dir install" \
  && locked="$pip --constraint requirements-lock.txt --requirement" \
  && if [ "$DEVICE" = cuda ]; then $locked requirements-cuda.txt; else \
    $pip --no-deps --retries 0 --index-url https://download.pytorch.org/whl/cpu "$(grep '^torch==' requirements.txt)"; \
    $locked requirements.txt; fi
ENV VENV=/opt/venv PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1

COPY . .
# Do not run as root, so that the files in a mounted folder do not belong to root.
RUN useradd --create-home --uid 1000 ppo && mkdir -p runs && chown ppo:ppo . runs
USER 1000
CMD ["./benchmark.sh"]
