"""`python -m biascope.cli`, the same as `biascope`."""

from biascope.cli import main

main()
