"""More of `emulated_lanes`: words that programs count in."""

from tests.ops.emulated_lanes import take_ticket


def above_pair(a, b):
    return a[0].above(b[0]) | (a[0].equals(b[0]) & a[1].above(b[1]))


arrive = take_ticket
