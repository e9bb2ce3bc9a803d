"""Tests, one folder per package; `numerics` holds the error metric and the tolerances."""
