"""Relax to Relax: simplify, choose layouts, pack weights, fuse; and the tasks that come out."""
