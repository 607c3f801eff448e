#!/usr/bin/env bash
# An environment with SGLang for CPUs: bash setup.sh FOLDER. Its metadata pins packages for CUDA, none
# of which is imported on a CPU; `stub/` stands for two of them that have no build for CPUs.
set -euo pipefail
python3 -m venv "$1"
"$1/bin/python" -m pip install --quiet uv
install() {
    "$1/bin/uv" pip install --quiet --python "$1/bin/python" \
        ${PIP_FIND_LINKS:+--find-links "$PIP_FIND_LINKS"} "${@:2}"
}
install "$1" torch==2.13.0 transformers==5.19.0 numpy setuptools
install "$1" --no-deps sglang==0.5.23 torchvision==0.28.0
install "$1" torch==2.13.0 triton==3.7.1 aiohttp anthropic blobfile build compressed-tensors==0.18.0 \
    datasets distro easydict einops fastapi gguf interegular IPython "llguidance<2" \
    "mistral_common>=1.11.5" msgspec ninja numba openai==2.8.0 openai-harmony orjson outlines==0.1.11 \
    packaging partial_json_parser pillow prometheus-client psutil py-spy pybase64 pydantic \
    python-multipart pyzmq regex requests scipy sentencepiece setproctitle soundfile tiktoken uvicorn \
    uvloop watchfiles xgrammar xxhash zstandard
cp -r "$(dirname "$0")/stub/." "$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
