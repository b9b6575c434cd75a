"""Engines in turns, each in a process of its own."""
