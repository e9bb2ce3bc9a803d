"""`minimax-serve profile`: a table of measured costs that the scheduler reads."""

from dataclasses import replace

import pytest

from configs.speculative import SpeculativeConfig
from minimax_jax.speculative.calibration import Calibration
from minimax_jax.speculative.setup import Speculation
from pallas_kernels.layouts.pool import CacheFormats
from serving.__main__ import main
from serving.profile_costs import measure
from serving.scheduling.cost_table import read_costs, write_costs
from tests.drafter.models import drafted, random_drafter
from tests.model.models import random_loaded, small


@pytest.mark.slow
def test_both_parts_are_measured_up_to_all_drafts_of_all_sequences(tmp_path):
    config = drafted(small(2, num_tokens=501))
    speculation = Speculation(
        drafter=random_drafter(config),
        config=SpeculativeConfig(),
        calibration=Calibration.none(7),
    )
    loaded = replace(
        random_loaded(config),
        speculation=speculation,
        formats=CacheFormats(kv="f32", index="f32", draft="fp8"),
    )
    costs = measure(loaded, max_num_seqs=2, context=20)
    assert costs.verify.tokens == (1, 2, 4, 8, 16) and costs.draft.tokens == (7, 14)
    assert costs.verify.seconds(16) >= costs.verify.seconds(1) > 0
    write_costs(tmp_path / "costs.json", costs)
    assert read_costs(tmp_path / "costs.json") == costs


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--max-num-seqs", "1"], "max_num_seqs=1 is not at least 2"),
        (["--context", "0"], "context=0 is not at least 1"),
        (["--context", "4000"], "context=4000 leaves no room in the model's 2048"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(flags, sentence, capsys):
    with pytest.raises(SystemExit):
        main(["profile", "tiny", *flags])
    assert sentence in capsys.readouterr().err
