"""`python -m jaxserve`: the jaxserve command."""

from jaxserve.cli.main import main

if __name__ == "__main__":
    main()
