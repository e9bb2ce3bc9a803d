"""The gateway that is installed still sends the structural tags that were recorded."""

import json
from pathlib import Path

import pytest

pytest.importorskip("smg")
from tests.golden.record_structural_tags import record

pytestmark = pytest.mark.parity
RECORDED = Path(__file__).parents[1] / "golden" / "structural_tags.json"


def test_gateway_sends_what_was_recorded():
    assert record() == json.loads(RECORDED.read_text("utf-8"))
