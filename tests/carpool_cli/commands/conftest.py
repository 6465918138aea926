"""`carpool inject` on given manifests."""

from __future__ import annotations

import pytest


@pytest.fixture
def inject(carpool, tmp_path):
    def run(text, *options):
        path = tmp_path / "manifests.yaml"
        path.write_text(text)
        return carpool("inject", "-f", path, *options)

    return run
