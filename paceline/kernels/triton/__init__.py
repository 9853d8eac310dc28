"""Kernels in Triton. Only this package imports it, and nothing imports this package before it is asked for."""
