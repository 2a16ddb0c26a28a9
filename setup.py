raise SystemExit("MARS is not a package: clone it and run it there (see README.md)")
