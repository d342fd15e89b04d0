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
#   MEGATRON_CORE_VERSION       must be what setup.py asks for, or the build stops
#   TRANSFORMER_ENGINE_VERSION  installed where the base has a CUDA compiler and no Transformer Engine
#   APEX_REF                    branch, tag or commit of NVIDIA's apex, built where the base has a CUDA
#                               compiler, git and no apex; empty: never. It is optional, see setup.py
#   MAX_JOBS                    compilers at a time while these are built
#   USER_ID                     of the user that the image runs as; give your own where the image
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

# Dependencies first: this layer is built again only when setup.py or pyproject.toml change. The
# base's torch is held, as one from PyPI would not fit its Transformer Engine; NVIDIA's images name
# constraints of their own in PIP_CONSTRAINT, which stay in force. The version is that of the
# installed package: PyTorch's own word for it may have a suffix that pip knows nothing of.
COPY setup.py pyproject.toml LICENSE ./
RUN python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
        > held.txt \
    && echo "megatron-core==${MEGATRON_CORE_VERSION}" >> held.txt \
    && mkdir -p megatron/hydraulis hydraulis_patches \
    && PIP_CONSTRAINT="$PWD/held.txt${PIP_CONSTRAINT:+ ${PIP_CONSTRAINT}}" \
        python -m pip install --no-cache-dir --editable . \
    && rm -r held.txt megatron hydraulis_patches

# What the base lacks, where it can be built and used: importing Transformer Engine without CUDA
# fails, and megatron-core's import with it. Built against the base's torch, hence no isolation.
RUN if python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("transformer_engine"))'; \
    then echo "Transformer Engine: the base has it"; \
    elif ! command -v nvcc; then echo "Transformer Engine: left out, the base has no nvcc"; \
    else MAX_JOBS="${MAX_JOBS}" python -m pip install --no-cache-dir --no-build-isolation \
        "transformer-engine[pytorch]==${TRANSFORMER_ENGINE_VERSION}"; fi \
    && if python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("apex"))'; \
    then echo "apex: the base has it"; \
    elif [ -z "${APEX_REF}" ] || ! command -v nvcc || ! command -v git; \
    then echo "apex: left out, without APEX_REF, nvcc or git"; \
    else APEX_CPP_EXT=1 APEX_CUDA_EXT=1 MAX_JOBS="${MAX_JOBS}" python -m pip install \
        --no-cache-dir --no-build-isolation "git+https://github.com/NVIDIA/apex@${APEX_REF}"; fi

COPY pretrain_gpt.py ./
COPY megatron ./megatron
COPY hydraulis_patches ./hydraulis_patches
COPY scripts ./scripts

# The package itself; then a user without rights on it, who owns only the folder of runs; then a
# smoke test as that user. A build has no GPU driver, without which Transformer Engine's import
# fails and megatron-core's with it; marked as absent, both do without.
RUN python -m pip install --no-cache-dir --no-deps --editable . \
    && useradd --create-home --uid "${USER_ID}" hydraulis \
    && mkdir runs && chown hydraulis: runs
USER ${USER_ID}
RUN python -W ignore -c '\
import sys; sys.modules["transformer_engine"] = None; \
import highspy, torch, megatron.core, megatron.training, megatron.hydraulis.loop.entry' \
    && python -m hydraulis_patches \
    && hydraulis --version

# Whether the program can be imported with what the container was given, driver and mounts included.
HEALTHCHECK --interval=10m --timeout=3m --start-period=3m --retries=2 \
    CMD ["python", "-W", "ignore", "-c", "import megatron.training, megatron.hydraulis.loop.entry"]

CMD ["hydraulis", "--help"]
