"""`python -m specdec` is the command `specdec`."""

from specdec.cli.main import app

if __name__ == "__main__":
    app(prog_name="specdec")
