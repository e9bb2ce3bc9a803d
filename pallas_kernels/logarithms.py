"""Between powers of e, which softmaxes are of, and powers of two, which the hardware has."""

LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
