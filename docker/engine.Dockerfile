# The engine: gRPC server, sources, merge. No torch, no weights; it needs a worker to speak to.
#   docker build -f docker/engine.Dockerfile -t draftloom-engine .
FROM python:3.11-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN python -m venv /opt/draftloom \
    && /opt/draftloom/bin/pip install --no-cache-dir --constraint constraints.txt ".[engine,index]"

FROM python:3.11-slim
COPY --from=build /opt/draftloom /opt/draftloom
RUN useradd --create-home --uid 10001 draftloom && install -d -o draftloom /corpora /models
USER draftloom
ENV PATH=/opt/draftloom/bin:$PATH DRAFTLOOM_HOME=/corpora DRAFTLOOM_CACHE=/models
EXPOSE 50151
ENTRYPOINT ["draftloom"]
CMD ["serve", "--host", "0.0.0.0", "--insecure"]
