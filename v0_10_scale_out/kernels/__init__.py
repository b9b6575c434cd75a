"""The kernels: those in C, how they are built and called; and one for GPUs, in Triton."""
