#!/usr/bin/env bash
# Installs Isthmus into the Python of a container and keeps the container's torch; run by Dockerfile and isthmus.def.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_BREAK_SYSTEM_PACKAGES=1
torch=$(mktemp)
python3 -c 'import torch; print("torch==" + torch.__version__)' > "$torch"
python3 -m pip install --constraint "$torch" '.[tensorboard,sentencepiece,data]'
rm "$torch"
cd / && python3 -c 'import isthmus.recipes.run' && isthmus --version
