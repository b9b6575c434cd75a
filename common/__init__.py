"""What no milestone teaches: configuration, weights, Llama's maths, sampling, text in and text out.

Nothing here knows of scheduling, paging or HTTP, and nothing here imports a milestone. Importing the package loads
nothing; `errors`, `sampling_params`, `outputs`, `chat` and `cli` stay free of torch, so that `--help` and the policy
files of later milestones start at once.
"""
