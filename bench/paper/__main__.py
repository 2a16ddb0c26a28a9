"""`python -m bench.paper` is `python -m bench.paper.run`."""

from plumbing.errors import run_main

from bench.paper.run import main

run_main(main)
