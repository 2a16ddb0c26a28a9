"""What an app imports that is run as a file: it does not find the modules next to apps/.

It finds this one, because Python then looks in apps/ itself.
"""

import sys
from pathlib import Path

name = Path(sys.argv[0]).stem
print(f"error: run it from the project's folder: python -m apps.{name}", file=sys.stderr)
sys.exit(2)
