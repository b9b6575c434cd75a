"""What no milestone teaches: configuration, weights, Llama's maths, sampling, text in and text out.

Nothing here knows of scheduling, paging or HTTP, and nothing here imports a milestone. Importing the package loads
nothing. What policy files and `--help` need stays free of torch: `tools/import_rules.py` has the list.
"""
