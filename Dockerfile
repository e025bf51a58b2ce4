# CPU:         docker build -t ppo-rosetta .
# NVIDIA GPU:  docker build --build-arg DEVICE=cuda -t ppo-rosetta:cuda .
# Run:         docker run --rm --init [--gpus all] -v "$PWD/runs:/ppo/runs" ppo-rosetta
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}

# torch.compile needs a C++ compiler when it runs; git says which commit a run came from.
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install --yes --no-install-recommends g++ git \
  && rm -rf /var/lib/apt/lists/*

WORKDIR /ppo
COPY requirements.txt requirements-cuda.txt requirements-lock.txt ./
ARG DEVICE=cpu
# As setup.sh does it: without a GPU, torch comes from PyTorch's CPU index if that can be reached.
RUN python3 -m venv /opt/venv \
  && pip="/opt/venv/bin/pip --no-cache-dir install" \
  && locked="$pip --constraint requirements-lock.txt --requirement" \
  && if [ "$DEVICE" = cuda ]; then $locked requirements-cuda.txt; else \
    $pip --no-deps --retries 0 --index-url https://download.pytorch.org/whl/cpu "$(grep '^torch==' requirements.txt)"; \
    $locked requirements.txt; fi
ENV VENV=/opt/venv PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1

COPY . .
# Any user may run the image, so that the runs in a mounted folder belong to who started it.
RUN useradd --create-home --uid 1000 ppo && mkdir -p runs && chown ppo:ppo . runs
USER 1000
CMD ["./benchmark.sh"]
