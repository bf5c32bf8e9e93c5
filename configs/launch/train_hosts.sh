#!/usr/bin/env bash
# The same command on every host of a TPU VM slice: TPU=... ZONE=... configs/launch/train_hosts.sh [key=value ...]
set -euo pipefail

: "${TPU:?the name of the TPU VM}" "${ZONE:?its zone}"

gcloud compute tpus tpu-vm ssh "$TPU" --zone "$ZONE" --worker=all \
  --command "cd k3jax && .venv/bin/python train.py --config configs/train/k3_tpu7x.yaml ${*@Q}"
