"""A store on a real file, its clock in the test's hands."""

from __future__ import annotations

import pytest

from carpool_sidecar.config.settings import Jobs
from carpool_sidecar.jobs.storage.batches import Batches
from carpool_sidecar.jobs.storage.database import Database
from carpool_sidecar.jobs.storage.files import Files
from carpool_sidecar.jobs.storage.jobs import JobStore


class Disk:
    """Store and batches on one file; `again` is what a new process finds."""

    def __init__(self, path, **settings) -> None:
        self.settings = Jobs(path=str(path), **settings)
        self.open()

    def open(self):
        self.database = Database(self.settings.path)
        self.store = JobStore(self.database, self.settings)
        self.files = Files(self.database, self.store, self.settings)
        self.batches = Batches(self.database, self.store, self.files, self.settings)

    def again(self, now=0.0, *, idempotent=True):
        self.database.close()
        self.open()
        found = self.store.recover(now, idempotent=idempotent) + self.batches.recover(now, idempotent=idempotent)
        self.store.count()
        return found

    @property
    def totals(self):
        self.store.count()
        return {name: value for name, value in self.store.totals.items() if value}


@pytest.fixture
def disk(tmp_path):
    opened = []

    def make(**settings):
        opened.append(Disk(tmp_path / "jobs.db", **settings))
        return opened[-1]

    yield make
    for one in opened:
        one.database.close()
