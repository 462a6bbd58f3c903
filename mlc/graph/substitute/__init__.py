"""Verified substitutions over whole models: which of the graphs that proved rules make equal is the fastest."""
