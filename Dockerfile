# `make docker-check` lints this without Docker.
# docker build -t scalify-trainer . && docker run --gpus all -v "$PWD/runs:/app/runs" scalify-trainer precision=bf16
FROM nvidia/cuda:13.0.2-base-ubuntu24.04

# Ubuntu keeps only the newest build of a package: a pinned version would be gone with the next one.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv ca-certificates git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /app
COPY pyproject.toml requirements.lock ./
# The lock's hashes are checked; the CUDA libraries come as wheels, the driver from the host.
RUN python3 -m venv /tools && /tools/bin/pip install --no-cache-dir uv \
    && python3 -m venv /venv \
    && /tools/bin/uv pip install --no-cache --compile-bytecode --python /venv \
        --constraint requirements.lock -r pyproject.toml --extra gpu

COPY scalify_core scalify_core
COPY trainer trainer
COPY scripts scripts

ENTRYPOINT ["/venv/bin/python", "-m", "trainer"]
