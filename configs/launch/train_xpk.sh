#!/usr/bin/env bash
# A training run through XPK: CLUSTER=... IMAGE=... configs/launch/train_xpk.sh [key=value ...]
set -euo pipefail

: "${CLUSTER:?the name of the XPK cluster}" "${IMAGE:?an image with this repository installed}"
SLICES="${SLICES:-1}"

xpk workload create \
  --cluster "$CLUSTER" \
  --workload "${WORKLOAD:-k3-train}" \
  --tpu-type "${TPU_TYPE:-tpu7x-1024}" \
  --num-slices "$SLICES" \
  --max-restarts 20 \
  --docker-image "$IMAGE" \
  --command "K3JAX_SLICES=$SLICES python train.py --config configs/train/k3_tpu7x.yaml mesh.data=$SLICES \
    data.batch_size=$((1024 * SLICES)) run_dir=${RUN_DIR:-/runs/k3} ${*@Q}"
