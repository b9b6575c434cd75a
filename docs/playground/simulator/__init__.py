"""Runs a milestone's scheduler and block manager on scripted requests, with a clock that a cost model moves.

    policy.py        the milestone's files as a package, with the reader's functions in place of its own
    scenario.py      a setting, and the requests that follow from it
    simulation.py    the loop: schedule, "compute", update, check
    tellers.py       what has happened, as the visualizer's messages: told by the files themselves,
    comparing.py     or found out by comparing
    cost.py          what a step takes
    metrics.py       what users of the server would have noticed
    challenges.py    tasks, and whether a run solves one
    entry.py         JSON in, JSON out, for the page

It needs Python's standard library only. The same files run in the browser (Pyodide) and in CPython, where the tests run
them. What it leaves out: a model. Answers come from a script, and nothing here is a measurement.
"""
