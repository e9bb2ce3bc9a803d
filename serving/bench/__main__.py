"""`python -m serving.bench`, which is `minimax-serve bench`."""

from serving.bench.command import main

if __name__ == "__main__":
    main()
