"""The kernels in C: how they are built, and how they are called."""
