#!/bin/bash
# Shows what this pod was given, then runs nixl_benchmark.py with the arguments of the container.
# ALL_GPUS=1 drives every GPU at once, GPU k over the k-th HCA of the pod, port 5555 + k.
set -euo pipefail

echo "== /dev/infiniband"; ls /dev/infiniband 2>/dev/null || echo "(none)"
echo "== netdevs"; ls /sys/class/net
if command -v nvidia-smi >/dev/null; then
  nvidia-smi topo -m || echo "(nvidia-smi topo fails where there is a software RDMA device)"
fi

# Sysfs lists every HCA of the host; what this pod may open is in /dev/infiniband.
hcas=()
for file in /dev/infiniband/uverbs*; do
  [ -e "$file" ] && hcas+=("$(cat "/sys/class/infiniband_verbs/${file##*/}/ibdev")")
done
echo "== HCAs of this pod: ${hcas[*]:-none}"
if [ -n "${EXPECTED_NICS:-}" ] && [ "${#hcas[@]}" -ne "$EXPECTED_NICS" ]; then
  echo "this pod sees ${#hcas[@]} HCAs and its claim allocated $EXPECTED_NICS" >&2
  exit 1
fi

# Without dependencies: NIXL needs numpy alone, and pip would replace the torch of the image.
python3 -c 'import nixl._api' 2>/dev/null ||
  pip install --quiet --no-deps "nixl==${NIXL_VERSION:-1.5.1}" "nixl-cu12==${NIXL_VERSION:-1.5.1}"
cd "$(dirname "$0")"

if [ "${ALL_GPUS:-0}" != 1 ]; then
  exec python3 nixl_benchmark.py "$@"
fi

gpus=$(nvidia-smi -L | wc -l)
if [ "${#hcas[@]}" -lt "$gpus" ]; then
  echo "$gpus GPUs cannot have an HCA each: this pod sees ${#hcas[@]}" >&2
  exit 1
fi
ends=()
for ((k = 0; k < gpus; k++)); do
  # One device and one rail, or the rails of several GPUs meet on one HCA.
  UCX_NET_DEVICES="${hcas[k]}:1" UCX_MAX_RMA_RAILS=1 \
    python3 nixl_benchmark.py "$@" --device "cuda:$k" --port $((5555 + k)) &
  ends+=($!)
done
code=0
for end in "${ends[@]}"; do wait "$end" || code=1; done
exit "$code"
