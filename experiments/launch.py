"""How experiments start: absl's flags, and bad input that ends in one line."""

import sys
from collections.abc import Callable

from absl import app, logging

from vit.arguments import parse_flags


def run(main: Callable[[], None]) -> None:
    """Parses the flags and calls `main`; a ValueError is printed without its traceback."""

    def guarded(_: list[str]) -> None:
        logging.set_verbosity(logging.WARNING)
        try:
            main()
        except ValueError as error:
            sys.exit(f"ValueError: {error}")

    app.run(guarded, flags_parser=parse_flags)
