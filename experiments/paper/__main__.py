"""`python -m experiments.paper` is `python -m experiments.paper.run`."""

from experiments.paper.run import main
from plumbing.errors import run_main

run_main(main)
