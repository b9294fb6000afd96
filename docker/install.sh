#!/usr/bin/env bash
# Installs the wheel in this folder into the Python of an image, with the extras in EXTRAS. A torch of the image stays;
# without one, it comes from TORCH_INDEX, or from the default index. The other versions are those of constraints/, if they
# exist for this Python, else the ranges of the wheel. Run by the Dockerfiles and isthmus.def.
set -euo pipefail
cd "$(dirname "$0")"
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_BREAK_SYSTEM_PACKAGES=1
wheels=(isthmus-*.whl)
if [ "${#wheels[@]}" != 1 ] || [ ! -f "${wheels[0]}" ]; then
  echo "dist/ must have one wheel of isthmus, got: ${wheels[*]}. Empty dist/ and run: make dist" >&2
  exit 1
fi
versions=$(mktemp)
cat "cpu-py$(python -c 'import sys; print("%d%d" % sys.version_info[:2])').txt" > "$versions" 2>/dev/null || true
if ! python -c 'import torch' 2>/dev/null; then
  torch=$(grep '^torch==' "$versions") || { echo "No torch in this image, and constraints/ has none for its Python." >&2; exit 1; }
  # The packages that torch requires come with the wheel, from the default index.
  python -m pip install --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"
fi
sed -i '/^torch==/d' "$versions"
python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' >> "$versions"
python -m pip install --constraint "$versions" "${wheels[0]}[$EXTRAS]"
rm "$versions"
# Any user may write there: docker run --user, and arbitrary users of Kubernetes. New volumes get the same permissions.
getent passwd 1000 > /dev/null || useradd --uid 1000 --no-create-home --home-dir /home/isthmus isthmus
install -d -m 1777 /home/isthmus /home/isthmus/.cache /workspace
cd / && python -c 'import isthmus.recipes.run' && isthmus --version
