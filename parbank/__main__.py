"""`python -m parbank`: what torchrun starts."""

from parbank.cli.main import main

if __name__ == "__main__":
    main()
