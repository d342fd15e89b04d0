# syntax=docker/dockerfile:1
#
#     docker build -t hydraulis .
#     docker build -t hydraulis --build-arg BASE_IMAGE=nvcr.io/nvidia/pytorch:26.06-py3 .
#
# The default base image brings PyTorch, Transformer Engine and NVIDIA's apex built for each other,
# and Python 3.12. Its PyTorch must satisfy setup.py, or the build stops at the first RUN: images
# before 26.05 hold 2.10 or a pre-release of 2.11.
#
# Build arguments, each with its default:
#   BASE_IMAGE                  an image with python >= 3.12 and PyTorch
#   MEGATRON_CORE_VERSION       must be the version in setup.py, or the build stops
#   TRANSFORMER_ENGINE_VERSION  installed if the base has a CUDA compiler and no Transformer Engine
#   APEX_REF                    branch, tag or commit of NVIDIA's apex, built if the base has a CUDA
#                               compiler, git and no apex; empty: never. Optional, see setup.py
#   MAX_JOBS                    number of compilers that run at a time
#   USER_ID                     of the user that the image runs as; give your own if the image
#                               writes to folders of the host
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:26.05-py3
# hadolint ignore=DL3006
FROM ${BASE_IMAGE}

ARG MEGATRON_CORE_VERSION=0.19.2
ARG TRANSFORMER_ENGINE_VERSION=2.20.2
ARG APEX_REF=25.09
ARG MAX_JOBS=8
ARG USER_ID=10001

WORKDIR /workspace/hydraulis

# Dependencies first: this layer is rebuilt only when setup.py or pyproject.toml change. The base's
# torch is pinned, as one from PyPI would not fit its Transformer Engine; constraints that NVIDIA's
# images set in PIP_CONSTRAINT still apply. The version is that of the installed package, because
# torch.__version__ may have a suffix that pip does not know.
COPY setup.py pyproject.toml LICENSE ./
RUN python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
        > pinned.txt \
    && echo "megatron-core==${MEGATRON_CORE_VERSION}" >> pinned.txt \
    && mkdir -p megatron/hydraulis hydraulis_patches \
    && PIP_CONSTRAINT="$PWD/pinned.txt${PIP_CONSTRAINT:+ ${PIP_CONSTRAINT}}" \
        python -m pip install --no-cache-dir --editable '.[train]' \
    && rm -r pinned.txt megatron hydraulis_patches

# What the base lacks, if it can be built and used: without CUDA, importing Transformer Engine fails,
# and with it megatron-core's import. Built against the base's torch, so without isolation.
RUN if python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("transformer_engine"))'; \
    then echo "Transformer Engine: the base has it"; \
    elif ! command -v nvcc; then echo "Transformer Engine: skipped, the base has no nvcc"; \
    else MAX_JOBS="${MAX_JOBS}" python -m pip install --no-cache-dir --no-build-isolation \
        "transformer-engine[pytorch]==${TRANSFORMER_ENGINE_VERSION}"; fi \
    && if python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("apex"))'; \
    then echo "apex: the base has it"; \
    elif [ -z "${APEX_REF}" ] || ! command -v nvcc || ! command -v git; \
    then echo "apex: skipped, without APEX_REF, nvcc or git"; \
    else APEX_CPP_EXT=1 APEX_CUDA_EXT=1 MAX_JOBS="${MAX_JOBS}" python -m pip install \
        --no-cache-dir --no-build-isolation "git+https://github.com/NVIDIA/apex@${APEX_REF}"; fi

COPY pretrain_gpt.py ./
COPY megatron ./megatron
COPY hydraulis_patches ./hydraulis_patches
COPY scripts ./scripts

# The package; then a user who may write only to the folder of runs; then a smoke test as that user.
# A build has no GPU driver, so Transformer Engine's import would fail, and with it megatron-core's;
# it is marked as absent.
RUN python -m pip install --no-cache-dir --no-deps --editable . \
    && useradd --create-home --uid "${USER_ID}" hydraulis \
    && mkdir runs && chown hydraulis: runs
USER ${USER_ID}
RUN python -W ignore -c '\
import sys; sys.modules["transformer_engine"] = None; \
import highspy, torch, megatron.core, megatron.training, megatron.hydraulis.loop.entry' \
    && python -m hydraulis_patches \
    && hydraulis --version

# Whether the program can be imported in this container, with its driver and mounts.
HEALTHCHECK --interval=10m --timeout=3m --start-period=3m --retries=2 \
    CMD ["python", "-W", "ignore", "-c", "import megatron.training, megatron.hydraulis.loop.entry"]

CMD ["hydraulis", "--help"]
