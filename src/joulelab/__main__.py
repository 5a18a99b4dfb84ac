"""`python -m joulelab` is the same program as the `joulelab` command."""

from joulelab.cli.main import main

if __name__ == "__main__":
    main()
