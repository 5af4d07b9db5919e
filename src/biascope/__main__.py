"""`python -m biascope`, the same as `biascope`."""

from biascope.cli import main

if __name__ == "__main__":
    main()
