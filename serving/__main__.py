"""The command `minimax-serve`, which until the server is there only says so."""

import sys


def main() -> None:
    """Prints one sentence to stderr and exits with code 2."""
    print("minimax-serve: there is no server yet; try minimax-jax generate.", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
