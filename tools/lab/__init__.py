"""The lab: write a milestone's functions yourself, with its own tests as the teacher. `python -m tools.lab`.

    tasks.py      what there is to write, from the ledger
    texts.py      hints, and the faults to find
    bodies.py     take a function's body out of a file, put one in, plant a fault: by the syntax tree
    workshop.py   the folder `lab/`, and how far the learner is
    start.py      make a lab; carry earlier work into it
    trial.py      run some tests against a lab, in a process of its own
    listener.py   in that process: pytest, and what it hears
    words.py      what a failed test says, for people
    telling.py    what the commands print
    checking.py   `check`
    commands.py   the other commands

Everything in a lab is made from the milestone as it is, so there is nothing here that could drift from it.
"""
