"""nvct gives containers the NVIDIA GPUs that they ask for, and no others."""

__version__ = "0.1.0"
