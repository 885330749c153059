"""Pages of a listing are the parts of the whole list, from whichever end the database begins."""

import json
from typing import Any

import pytest


@pytest.fixture
def several(api: Any) -> Any:
    for number in range(7):
        assert api.partition(f"partition-{number % 3}-{number}")
    return api


def total_of(page: Any) -> int:
    return int(json.loads(page.headers["X-Pagination"])["total"])


@pytest.mark.parametrize("order", ["CREATED_ASC", "CREATED_DESC", "NAME_DESC", "STATUS_ASC", "STATUS_DESC"])
@pytest.mark.parametrize("more", ["", "&status=Ready", "&query=partition-1"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_page_is_its_part_of_the_list(several: Any, order: str, more: str, size: int) -> None:
    path = f"nvlink-logical-partition?orderBy={order}{more}"
    whole = several.get(f"{path}&pageSize=100")
    total = total_of(whole)
    assert total == len(whole.json())
    for number in range(1, total // size + 3):
        page = several.get(f"{path}&pageSize={size}&pageNumber={number}")
        assert page.json() == whole.json()[(number - 1) * size : number * size]
        assert total_of(page) == total


def test_a_deleted_object_is_not_counted(several: Any) -> None:
    gone = several.get("nvlink-logical-partition?pageSize=1").json()[0]
    before = total_of(several.get("nvlink-logical-partition"))
    assert several.delete(f"nvlink-logical-partition/{gone['id']}").status_code == 202
    assert total_of(several.get("nvlink-logical-partition")) == before - 1
