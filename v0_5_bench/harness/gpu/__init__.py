"""Everything that needs a GPU, in one command: `python -m v0_5_bench.harness.gpu`."""
