"""More of `emulated_lanes`: words that programs count in."""


def above_pair(a, b):
    return a[0].above(b[0]) | (a[0].equals(b[0]) & a[1].above(b[1]))
