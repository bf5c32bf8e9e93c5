"""Images on the host: decoding, patches, the tokens one takes, and packing for the vision tower."""

from k3jax.vision.decode import ImageError, open_image
from k3jax.vision.image import image_token_count, preprocess
from k3jax.vision.pack import Packed, pack
from k3jax.vision.pool import Prepared, prepare_images

__all__ = [
    "ImageError",
    "Packed",
    "Prepared",
    "image_token_count",
    "open_image",
    "pack",
    "prepare_images",
    "preprocess",
]
