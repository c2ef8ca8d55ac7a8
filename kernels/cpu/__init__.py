"""Kernels for CPUs in C, compiled where they run."""
