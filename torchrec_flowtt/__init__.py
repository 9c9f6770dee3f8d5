"""Tensor-Train embedding tables for TorchRec."""
