"""Subnets and VPC prefixes: there are none, and clients of the wider API look for them when they start."""

from typing import Annotated

from fastapi import APIRouter
from fastapi import Query as Param
from starlette.responses import Response

from rackloom.carve.api import respond
from rackloom.carve.api.answers import Summary
from rackloom.carve.api.deps import TenantAdmin
from rackloom.carve.api.queries import PageQuery

router = APIRouter()


@router.get("/subnet", operation_id="get-all-subnet", response_model=list[Summary])
async def list_subnets(_caller: TenantAdmin, query: Annotated[PageQuery, Param()]) -> Response:
    """No subnet."""
    return respond.listing([], 0, query.page)


@router.get("/vpc-prefix", operation_id="get-all-vpc-prefix", response_model=list[Summary])
async def list_prefixes(_caller: TenantAdmin, query: Annotated[PageQuery, Param()]) -> Response:
    """No VPC prefix."""
    return respond.listing([], 0, query.page)
