"""Write a milestone yourself, with its own tests as the teacher. docs/lab.md explains it.

python -m tools.lab start v0_1        a copy of v0.1 in lab/, with the lesson's functions for you to write
python -m tools.lab check             run the tests of the current task
python -m tools.lab hint              a question; again: an idea; again: the code's outline
python -m tools.lab status            all tasks, with ticks and minutes
"""

import argparse
import sys

from tools.lab import checking, commands
from tools.lab.tasks import LabError
from tools.milestones import LedgerError


def main(argv: list[str] | None = None) -> int:
    """Do what the command line says; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.lab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")

    start = verbs.add_parser("start", help="make a lab of a milestone, and open it")
    start.add_argument("milestone", help="v0_1, v0_2, ...")
    start.add_argument("--through", action="store_true", help="bring along what you wrote in the lab before it")
    start.add_argument("--fault", type=int, metavar="N", help="nothing to write: find the fault that is planted")
    start.add_argument("--again", action="store_true", help="begin anew; what is there is put aside")

    check = verbs.add_parser("check", help="run the tests of the current task")
    check.add_argument("task", nargs="?", help="another one: its number, or a function's name")
    check.add_argument("--all", action="store_true", dest="every", help="the tests of all tasks that are done")
    check.add_argument("--tests", action="store_true", help="of a fault: say what the tests see")
    check.add_argument("--verbose", action="store_true", help="all that pytest says")

    for verb, text in (("hint", "one hint more"), ("show", "the milestone's own code beside yours")):
        command = verbs.add_parser(verb, help=text)
        command.add_argument("task", nargs="?", help="for another task than the current one")

    verbs.add_parser("status", help="all tasks, with ticks and minutes")
    verbs.add_parser("reset", help="take a task's code out again").add_argument("task")
    run = verbs.add_parser("run", help="run the milestone with your code", add_help=False)
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="the milestone's own")

    args = parser.parse_args(argv)
    try:
        match args.verb:
            case "start":
                return commands.begin(args.milestone, through=args.through, fault=args.fault, again=args.again)
            case "check":
                return checking.check(args.task, every=args.every, tests=args.tests, verbose=args.verbose)
            case "hint":
                return commands.hint(args.task)
            case "show":
                return commands.show(args.task)
            case "reset":
                return commands.reset(args.task)
            case "run":
                return commands.run_milestone(args.arguments)
        return commands.status()
    except (LabError, LedgerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
