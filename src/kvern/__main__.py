"""`python -m kvern` is the command `kvern`."""

from kvern.cli.main import entry_point

if __name__ == "__main__":
    entry_point()
