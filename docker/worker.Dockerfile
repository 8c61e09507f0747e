# The worker: torch with CUDA, the weights, the KV cache.
#   docker build -f docker/worker.Dockerfile -t draftloom-worker .
FROM nvidia/cuda:12.8.1-runtime-ubuntu24.04 AS build
RUN apt-get update && apt-get install -y --no-install-recommends build-essential python3 python3-venv python3-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN python3 -m venv /opt/draftloom \
    && /opt/draftloom/bin/pip install --no-cache-dir --constraint constraints.txt ".[worker]"

FROM nvidia/cuda:12.8.1-runtime-ubuntu24.04
# a compiler and headers: the attention kernel is compiled for the device at start
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev python3 python3-dev && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/draftloom /opt/draftloom
RUN useradd --create-home --uid 10001 draftloom && install -d -o draftloom /models
USER draftloom
ENV PATH=/opt/draftloom/bin:$PATH DRAFTLOOM_CACHE=/models
EXPOSE 50152
ENTRYPOINT ["python3", "-m", "engine.target.server"]
CMD ["--address", "0.0.0.0:50152", "--insecure", "--model", "smollm2-135m"]
