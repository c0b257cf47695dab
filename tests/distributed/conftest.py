"""The processes that these tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Pool


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()
