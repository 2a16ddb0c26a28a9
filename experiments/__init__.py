"""Measurements; each prints Markdown: `python -m bench.quality`, `python -m bench.speed`, ..."""
