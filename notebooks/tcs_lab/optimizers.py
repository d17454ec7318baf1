"""An old name: the command is `tcs optimizers`, the module tcs_lab.studies.optimizers."""

import sys

from tcs_lab.__main__ import main

if __name__ == "__main__":
    print("hint: python -m tcs_lab.optimizers is now called: tcs optimizers", file=sys.stderr)
    sys.exit(main(["optimizers", *sys.argv[1:]]))
