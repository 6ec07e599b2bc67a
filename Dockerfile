# An image with async_grpo, its packages and the tools that it compiles with (docs/how-to/deploy/kubernetes.md):
#
#   docker build --tag async_grpo .                              # CUDA; building it needs no GPU
#   docker build --tag async_grpo:cpu --build-arg SET=cpu .
#
# Plain Debian, for both sets: the packages bring the libraries of CUDA 13, the host its driver. Debian's Python is 3.11.
FROM debian:bookworm-slim

# At run time too: Triton and torch.compile need the compiler and Python.h, KubeRay's probes need bash and wget.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ make python3-dev python3-venv wget \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --shell /bin/bash --uid 1000 grpo \
    && install --directory --owner=grpo --group=grpo /opt/async_grpo
USER 1000:1000
WORKDIR /opt/async_grpo

# The packages alone, which are installed again only when one of these files changes; with bytecode, since what a
# container compiles is lost with it.
ARG SET=gpu
COPY --chown=1000:1000 LICENSE install.py packages.toml pyproject.toml setup.py ./
RUN mkdir async_grpo && touch README.md async_grpo/__init__.py \
    && PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1 python3 install.py --set "$SET" --no-gpu

COPY --chown=1000:1000 . .
ENV PATH=/opt/async_grpo/.venv/bin:$PATH \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["async-grpo", "doctor"]
