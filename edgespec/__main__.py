"""``python -m edgespec`` and the ``edgespec`` command."""

from edgespec.cli.app import main

if __name__ == "__main__":
    main()
