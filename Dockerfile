# joulelab in a container. Not built or run so far.
#
#   docker build --tag joulelab .                                                        # CPU
#   docker build --tag joulelab --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu126 \
#     --build-arg BASE=nvidia/cuda:12.6.3-base-ubuntu24.04 .                             # CUDA
#   docker run --rm --volume "$PWD/runs:/runs" joulelab doctor
#   docker run --rm --gpus all ... joulelab infer deit-t                                 # NVML is visible with --gpus
#   docker run --rm --volume /sys/class/powercap:/host/class/powercap:ro \
#     --volume /sys/devices/virtual/powercap:/host/devices/virtual/powercap:ro \
#     ... joulelab measure --rapl-root /host/class/powercap -- ...        # RAPL, which Docker hides at its usual place
ARG BASE=debian:13-slim
FROM ${BASE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN apt-get update && \
    apt-get install --yes --no-install-recommends python3 python3-venv && \
    rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/joulelab
ENV PATH=/opt/joulelab/bin:$PATH JOULELAB_RUNS=/runs
# torch first and alone: it is the largest layer and changes least; the bound is that of the tested versions
COPY constraints.txt /src/
RUN pip install --no-cache-dir --constraint /src/constraints.txt torch --index-url "${TORCH_INDEX}"
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir --constraint /src/constraints.txt "/src[train,report,query]" && joulelab --version
VOLUME /runs
WORKDIR /work
ENTRYPOINT ["joulelab"]
CMD ["doctor"]
