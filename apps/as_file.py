"""All that an app finds if it is run as a file: Python then looks in apps/, and not next to it."""

import sys
from pathlib import Path

name = Path(sys.argv[0]).stem
print(f"error: run it from the project's folder: python -m apps.{name}", file=sys.stderr)
sys.exit(2)
