"""Proved substitutions on whole models: finds the fastest of the graphs that the rules show to be equal."""
