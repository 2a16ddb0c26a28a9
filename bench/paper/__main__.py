"""`python -m bench.paper` is `python -m bench.paper.run`."""

from plumbing.errors import run

from bench.paper.run import main

run(main)
