"""`python -m parbank`: the entry point for torchrun."""

from parbank.cli.main import main

if __name__ == "__main__":
    main()
