"""Where the time goes: parts of a step, experiments, and what the machine can do at most."""
