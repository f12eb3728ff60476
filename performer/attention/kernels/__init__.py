"""Kernels for TPU and GPU: features never leave the chip.

which   which kernels a call gets, and their derivative
gpu     NVIDIA GPUs, Pallas on Triton
tpu     TPU, Pallas on Mosaic
"""
