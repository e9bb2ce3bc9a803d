"""Rewards of users that go wrong; at the top of a module, so that a worker process can import
them.
"""

import os
import time


def raises(question, answer):
    raise KeyError("gold")


def hangs(question, answer):
    if answer.text == "hang":
        time.sleep(60)
    return 1.0


def dies(question, answer):
    os._exit(3)


def no_number(question, answer):
    return float("nan") if answer.text == "nan" else "yes"


def length(question, answer):
    return float(answer.num_tokens)
