"""The command `parbank`, and `python -m parbank`, the entry point for torchrun."""

import sys


def main() -> None:
    """Runs the command line. The imports come first, and Ctrl-C during them ends without a traceback, too."""
    try:
        from parbank.cli.main import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
