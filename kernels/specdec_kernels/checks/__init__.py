"""Checks of the kernels: the ahead-of-time gate, the GPU check, and what a GPU allows."""
