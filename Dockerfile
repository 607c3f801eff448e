# Image that runs the quickstart: docker build -t rlctl . && docker run --shm-size=2g rlctl
# `docker stop --time 60` leaves the time to save the run.
# With GPUs: docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 -t rlctl .
FROM python:3.11-slim@sha256:9c900dea9e8fb7e16277c179b555cc72d29a352dbc33cff48ad5a0412fd5bfc7

# The CPU build of torch is a tenth of the size of that for CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Extras, such as vllm (needs the index for CUDA) or wandb.
ARG EXTRAS=

RUN pip install --no-cache-dir uv==0.13.9
WORKDIR /src
COPY pyproject.toml constraints.txt tested.txt README.md LICENSE ./
COPY rlctl ./rlctl
COPY recipes ./recipes
RUN uv pip install --system --no-cache --compile-bytecode --override constraints.txt \
        --constraint tested.txt \
    --extra-index-url "$TORCH_INDEX" --index-strategy unsafe-best-match ".${EXTRAS:+[$EXTRAS]}"

RUN useradd --create-home rlctl
USER rlctl
WORKDIR /home/rlctl
# Mount a folder here to keep the runs: docker run -v rlctl-runs:/home/rlctl/runs …
ENV RLCTL_RUNS=/home/rlctl/runs
RUN mkdir "$RLCTL_RUNS"
VOLUME /home/rlctl/runs
ENTRYPOINT ["rlctl"]
CMD ["train", "ppo"]
