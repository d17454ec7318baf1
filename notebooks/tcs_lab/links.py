"""An old name: the command is `tcs links`, the module tcs_lab.studies.links."""

import sys

from tcs_lab.__main__ import main

if __name__ == "__main__":
    print("hint: python -m tcs_lab.links is now called: tcs links", file=sys.stderr)
    sys.exit(main(["links", *sys.argv[1:]]))
