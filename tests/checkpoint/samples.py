"""Tensors that a checkpoint holds beside the text model."""

import ml_dtypes
import numpy as np

VISION = {
    "vision_tower.encoder.blocks.0.wqkv.weight": np.arange(12, dtype=np.float32).reshape(4, 3),
    "mm_projector.proj.0.weight": np.ones((3, 2), ml_dtypes.bfloat16),
}
