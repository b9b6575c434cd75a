"""The benchmark harness, in rooms that import downwards only:

cli
gpu        what needs a GPU, in one command
explain    where the time goes
report     tables and plots
compare    engines in turns, each in a process of its own
load       requests, the client that sends them, and what came of them
"""

MILESTONE = __name__.partition(".")[0]  # the package that is measured unless another one is named
PROFILER = f"{__name__}.explain.profiler"  # by name: the process that is profiled loads it
