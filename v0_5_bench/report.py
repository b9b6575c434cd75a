"""`python -m v0_5_bench report`: tables and plots from the results. Not yet written."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None so far."""


def run(args: argparse.Namespace) -> None:
    """Nothing so far."""
