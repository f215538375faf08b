# The course in a container: docker build -t course . && docker run --rm -p 127.0.0.1:8888:8888 course
# The dev container (.devcontainer/) is built from the first stage, with the clone mounted into it.
FROM python:3.13-slim-bookworm AS base
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends git iproute2 make \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --shell /bin/bash learner
USER learner

FROM base AS course
RUN mkdir /home/learner/course
COPY --chown=learner . /home/learner/course
WORKDIR /home/learner/course
# docker build --build-arg BUILDS=CUDA . installs PyTorch with CUDA, for docker run --gpus all.
ARG BUILDS=CPU
RUN make venv $BUILDS=1 && rm -rf ~/.cache
EXPOSE 8888
# A published port doesn't reach the container's 127.0.0.1, so listen on all addresses.
CMD ["make", "lab", "ARGS=--ip=0.0.0.0"]
