"""Kernels for TPU and GPU: features never leave the chip.

which   which kernels a call gets
run     the functions that they compute, each with its derivative
gpu     NVIDIA GPUs, Pallas on Triton
tpu     TPU, Pallas on Mosaic
"""
