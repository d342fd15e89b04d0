# syntax=docker/dockerfile:1
#
#     docker build -t hydraulis .
#     docker build -t hydraulis --build-arg BASE_IMAGE=nvcr.io/nvidia/pytorch:26.06-py3 .
#
# The base image brings PyTorch, Transformer Engine and NVIDIA's apex built for each other, and
# Python 3.12. Its PyTorch must satisfy setup.py, or the build stops at the first RUN: images before
# 26.05 hold 2.10 or a pre-release of 2.11.
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:26.05-py3
FROM ${BASE_IMAGE}

WORKDIR /workspace/hydraulis

# Dependencies first: this layer is built again only when setup.py or pyproject.toml change. The
# base's torch is held, as one from PyPI would not fit its Transformer Engine; NVIDIA's images name
# constraints of their own in PIP_CONSTRAINT, which stay in force.
COPY setup.py pyproject.toml ./
RUN python -c 'import torch; print("torch==" + torch.__version__)' > held.txt \
    && mkdir -p megatron/hydraulis hydraulis_patches \
    && PIP_CONSTRAINT="$PWD/held.txt${PIP_CONSTRAINT:+ ${PIP_CONSTRAINT}}" \
        python -m pip install --no-cache-dir --editable . \
    && rm -r held.txt megatron hydraulis_patches

COPY pretrain_gpt.py ./
COPY megatron ./megatron
COPY hydraulis_patches ./hydraulis_patches
COPY scripts ./scripts
RUN python -m pip install --no-cache-dir --no-deps --editable .

# Smoke test. A build has no GPU driver, without which Transformer Engine's import fails and
# megatron-core's with it; marked as absent, both do without.
RUN python -c '\
import sys; sys.modules["transformer_engine"] = None; \
import highspy, torch, megatron.core, megatron.training, megatron.hydraulis.loop.entry'
