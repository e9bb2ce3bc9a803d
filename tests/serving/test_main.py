"""The command `minimax-serve` before there is a server."""

import pytest

from serving.__main__ import main


def test_it_says_in_one_sentence_that_there_is_no_server(capsys):
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
