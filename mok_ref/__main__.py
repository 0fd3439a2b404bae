"""`python -m mok_ref` is the command line `mok-ref`."""

from mok_ref.cli import main

if __name__ == "__main__":
    main()
