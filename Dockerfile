# The miner in a container: the trial on a CPU, or a real miner on an NVIDIA GPU (docs/operating.md).
#
#   docker build --tag quasar-miner .
#   docker build --tag quasar-miner --build-arg BUILD=cuda .    # for a GPU
FROM python:3.11-slim

# gcc and libc's headers: Triton compiles a launcher for each kernel
RUN apt-get update && apt-get install --yes --no-install-recommends git gcc libc6-dev && \
    rm -rf /var/lib/apt/lists/*
RUN useradd --create-home miner && install --directory --owner miner /quasar
USER miner
WORKDIR /quasar
ENV PIP_NO_CACHE_DIR=1
ARG BUILD=cpu
COPY --chown=miner . .
RUN BUILD=$BUILD scripts/install.sh miner metrics
RUN mkdir -p state # a volume takes its owner from this folder
ENTRYPOINT ["./START_MINER.sh"]
CMD ["once"]
