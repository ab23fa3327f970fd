"""`softload` and `python -m softload`: the command line, or what to install for it."""

import sys

__all__ = ["main"]

try:
    from softload.cli import app
except ModuleNotFoundError as error:
    if error.name not in ("psutil", "rich", "typer"):
        raise
    sys.exit(
        f"softload: the command line needs {error.name}: pip install 'softload[cli]', or pip install '.[cli]' in a "
        "checkout"
    )


def main() -> None:
    """The console script."""
    app(prog_name="softload")


if __name__ == "__main__":
    main()
